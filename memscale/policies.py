"""Checkpoint policies, as data: they decide which values of a region are saved for backward.

A policy maps a `Site` (one operator call inside the region) to a verdict: `Save` its output, `Recompute` it in
backward, or `Move` it to another memory tier. Calls whose tensors need no gradient are always recomputed. The names and
their meanings are those of `jax.checkpoint_policies`.

Values: `nothing_saveable`, `everything_saveable`, `dots_saveable`, `dots_with_no_batch_dims_saveable`, and
`attention_saveable`, which JAX does not have.
Factories: `save_only_these_names`, `save_any_names_but_these`, `save_and_offload_only_these_names`,
`save_from_both_policies`. For a policy of your own: `Policy`, `Site`, and the verdicts `Save`, `Recompute`, `Move`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from memscale.core import ConfigError, Value, check_tier, factory, internals

__all__ = [
    "Move",
    "Policy",
    "Recompute",
    "Save",
    "Site",
    "Verdict",
    "attention_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_from_both_policies",
    "save_only_these_names",
]


@dataclasses.dataclass(frozen=True)
class Save:
    """Keep the value on the device until backward has used it."""


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Drop the value and compute it again in backward."""


@dataclasses.dataclass(frozen=True)
class Move:
    """Keep the value in another memory tier, and bring it back for backward. `tier` is as in `memscale.offload`."""

    tier: str = "auto"


Verdict = Save | Recompute | Move


@dataclasses.dataclass(frozen=True)
class Site:
    """A value inside a region, as a policy sees it.

    Attributes:
        op: the ATen operator that computes the value, such as ``torch.ops.aten.mm.default``.
        label: the label given by `memscale.name`, or `None`.
        batch_dims: the number of dimensions that a contraction shares between both sides and the result (1 for ``bmm``,
            0 for ``mm``); `None` for an operator that is no contraction.
    """

    op: internals.OpOverload
    label: str | None
    batch_dims: int | None


_OF_ATTENTION = 2
#: Contractions by their ATen names, with the number of batch dimensions. Operators are named rather than imported:
# fused attention kernels exist in some builds of torch only. Attention is two contractions over batch and heads.
BATCH_DIMS = {
    "aten::mm": 0,
    "aten::addmm": 0,
    "aten::mv": 0,
    "aten::addmv": 0,
    "aten::dot": 0,
    "aten::_int_mm": 0,
    "aten::_scaled_mm": 0,
    "aten::convolution": 0,
    "aten::bmm": 1,
    "aten::baddbmm": 1,
    "aten::_grouped_mm": 1,
    "aten::_scaled_dot_product_flash_attention": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 2,
    "aten::_scaled_dot_product_efficient_attention": 2,
    "aten::_scaled_dot_product_cudnn_attention": 2,
    "aten::_scaled_dot_product_fused_attention_overrideable": 2,
}


def batch_dims(op: internals.OpOverload) -> int | None:
    """Returns the number of batch dimensions of the contraction `op`; `None` if `op` is no contraction."""
    return BATCH_DIMS.get(op._schema.name)


#: The names of the operators whose results `attention_saveable` keeps.
FUSED_ATTENTION = frozenset(name for name, dims in BATCH_DIMS.items() if dims == _OF_ATTENTION)


class Policy(Value):
    """Base of every policy. A policy of your own subclasses it as a frozen dataclass and implements `verdict`.

    >>> import dataclasses, memscale as ms
    >>> @dataclasses.dataclass(frozen=True, repr=False)
    ... class OnlyConvolutions(ms.policies.Policy):
    ...     spelling = "OnlyConvolutions"
    ...     def verdict(self, site):
    ...         convolution = site.op is torch.ops.aten.convolution.default
    ...         return ms.policies.Save() if convolution else ms.policies.Recompute()
    >>> ms.checkpoint(policy=OnlyConvolutions())
    checkpoint(policy=OnlyConvolutions())

    Attributes:
        sees_labels: whether `verdict` may depend on more than the operator. With `False`, `verdict` is called once per
            operator, which makes regions faster.
    """

    sees_labels: ClassVar[bool] = True

    @property
    def moves(self) -> bool:
        """Whether the policy may return `Move`."""
        return False

    def verdict(self, site: Site) -> Verdict:
        """Returns the verdict about the value computed at `site`."""
        raise NotImplementedError


class _Constant(Policy):
    constant: ClassVar[bool] = True
    sees_labels: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, repr=False)
class NothingSaveable(_Constant):
    """Keep nothing but the region's inputs: the least memory, one more forward."""

    spelling: ClassVar[str] = "policies.nothing_saveable"

    def verdict(self, site: Site) -> Verdict:
        return Recompute()


@dataclasses.dataclass(frozen=True, repr=False)
class EverythingSaveable(_Constant):
    """Keep everything that autograd would keep: as if there were no checkpoint."""

    spelling: ClassVar[str] = "policies.everything_saveable"

    def verdict(self, site: Site) -> Verdict:
        return Save()


@dataclasses.dataclass(frozen=True, repr=False)
class DotsSaveable(_Constant):
    """Keep the outputs of matrix products, convolutions and fused attention; recompute the cheap rest."""

    spelling: ClassVar[str] = "policies.dots_saveable"

    def verdict(self, site: Site) -> Verdict:
        return Recompute() if site.batch_dims is None else Save()


@dataclasses.dataclass(frozen=True, repr=False)
class DotsWithNoBatchDimsSaveable(_Constant):
    """Keep the outputs of products without batch dimensions (projections), not attention scores or ``bmm``."""

    spelling: ClassVar[str] = "policies.dots_with_no_batch_dims_saveable"

    def verdict(self, site: Site) -> Verdict:
        return Save() if site.batch_dims == 0 else Recompute()


@dataclasses.dataclass(frozen=True, repr=False)
class AttentionSaveable(_Constant):
    """Keep the outputs of fused attention, which grow with the tokens while its time grows with their square."""

    spelling: ClassVar[str] = "policies.attention_saveable"

    def verdict(self, site: Site) -> Verdict:
        return Save() if site.batch_dims == _OF_ATTENTION else Recompute()


@dataclasses.dataclass(frozen=True, repr=False)
class SaveOnlyTheseNames(Policy):
    """Made by `save_only_these_names`."""

    spelling: ClassVar[str] = "policies.save_only_these_names"
    positional: ClassVar[str | None] = "names"

    names: tuple[str, ...] = ()

    def verdict(self, site: Site) -> Verdict:
        return Save() if site.label in self.names else Recompute()


@dataclasses.dataclass(frozen=True, repr=False)
class SaveAnyNamesButThese(Policy):
    """Made by `save_any_names_but_these`."""

    spelling: ClassVar[str] = "policies.save_any_names_but_these"
    positional: ClassVar[str | None] = "names"

    names: tuple[str, ...] = ()

    def verdict(self, site: Site) -> Verdict:
        return Save() if site.label is not None and site.label not in self.names else Recompute()


@dataclasses.dataclass(frozen=True, repr=False)
class SaveAndOffloadOnlyTheseNames(Policy):
    """Made by `save_and_offload_only_these_names`."""

    spelling: ClassVar[str] = "policies.save_and_offload_only_these_names"

    names_which_can_be_saved: tuple[str, ...] = ()
    names_which_can_be_offloaded: tuple[str, ...] = ()
    tier: str = "auto"

    @property
    def moves(self) -> bool:
        return True

    def verdict(self, site: Site) -> Verdict:
        if site.label in self.names_which_can_be_saved:
            return Save()
        if site.label in self.names_which_can_be_offloaded:
            return Move(self.tier)
        return Recompute()


@dataclasses.dataclass(frozen=True, repr=False)
class SaveFromBothPolicies(Policy):
    """Made by `save_from_both_policies`."""

    spelling: ClassVar[str] = "policies.save_from_both_policies"
    positional: ClassVar[str | None] = "policies"

    policies: tuple[Policy, ...] = ()

    @property
    def moves(self) -> bool:
        return any(policy.moves for policy in self.policies)

    def verdict(self, site: Site) -> Verdict:
        first, second = (policy.verdict(site) for policy in self.policies)
        return second if isinstance(first, Recompute) else first


nothing_saveable = NothingSaveable()
everything_saveable = EverythingSaveable()
dots_saveable = DotsSaveable()
dots_with_no_batch_dims_saveable = DotsWithNoBatchDimsSaveable()
attention_saveable = AttentionSaveable()


def save_only_these_names(*names: str) -> Policy:
    """Keep the values labelled with one of `names` by `memscale.name`, recompute everything else.

    >>> import memscale as ms
    >>> ms.policies.save_only_these_names("attention")
    policies.save_only_these_names('attention')
    """
    return SaveOnlyTheseNames(_names("save_only_these_names", names))


def save_any_names_but_these(*names: str) -> Policy:
    """Keep every labelled value except those labelled with one of `names`; recompute what has no label.

    >>> import memscale as ms
    >>> ms.policies.save_any_names_but_these()
    policies.save_any_names_but_these()
    """
    return SaveAnyNamesButThese(_names("save_any_names_but_these", names, least=0))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str] = (),
    names_which_can_be_offloaded: tuple[str, ...] | list[str] = (),
    tier: str = "auto",
) -> Policy:
    """Keep some labelled values on the device and move others to `tier`; recompute everything else.

    >>> import memscale as ms
    >>> ms.policies.save_and_offload_only_these_names(names_which_can_be_offloaded=["block_input"])
    policies.save_and_offload_only_these_names(names_which_can_be_offloaded=('block_input',))

    Raises:
        ConfigError: a name is in both lists, or no name is given.
    """
    where = "save_and_offload_only_these_names"
    saved = _names(where, names_which_can_be_saved, least=0)
    moved = _names(where, names_which_can_be_offloaded, least=0)
    if both := sorted(set(saved) & set(moved)):
        raise ConfigError(f"{where}: {both} cannot be both saved and offloaded; leave each name in one list")
    _names(where, saved + moved)
    check_tier(f"{where}(tier=...)", tier)
    return SaveAndOffloadOnlyTheseNames(saved, moved, tier)


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
    """Keep the values that either policy keeps; for a value that both would keep, the first policy decides how.

    >>> import memscale as ms
    >>> ms.policies.save_from_both_policies(
    ...     ms.policies.dots_saveable, ms.policies.save_only_these_names("scores"))
    policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names('scores'))

    Raises:
        ConfigError: an argument is not a policy.
    """
    for policy in (policy_1, policy_2):
        check_policy("save_from_both_policies", policy)
    return SaveFromBothPolicies((policy_1, policy_2))


def check_policy(where: str, policy: Any) -> None:
    """Raises `ConfigError` unless `policy` is a policy value."""
    if not isinstance(policy, Policy):
        hint = "; call it first" if callable(policy) else ""
        raise ConfigError(
            f"{where}: a policy is a value of memscale.policies such as policies.dots_saveable, got {policy!r}{hint}"
        )


def _names(where: str, names: Any, *, least: int = 1) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: a name is a non-empty string as given to memscale.name, got {name!r}")
    if isinstance(names, str) or len(names) < least:
        raise ConfigError(f"{where}: give at least {least} name as separate strings, got {names!r}")
    return tuple(names)


for _value in (
    nothing_saveable,
    everything_saveable,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    attention_saveable,
):
    factory(_value.spelling, lambda value=_value: value)
for _make in (
    save_only_these_names,
    save_any_names_but_these,
    save_and_offload_only_these_names,
    save_from_both_policies,
):
    factory(f"policies.{_make.__name__}", _make)
