"""Results of operators that a policy saves in a region's run, and that a recompute returns again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from memscale.core import internals, pytrees, version
from memscale.regions import hooks_around, recomputes, restore_state, running_statistics, state_of, unrecorded
from memscale.runtime import Hooks, Runtime, hooks_here
from memscale.transforms.checkpoint.saved import SavedTensors

#: An operator and its arguments; a tensor is given by its shape, dtype and `requires_grad`.
CallSpec = tuple[Any, ...]


def call_spec(op: internals.OpOverload, args: Any, kwargs: Any) -> CallSpec | None:
    """Returns a key that identifies a call of `op`; `None` for a call without a tensor that requires a gradient.

    Calls without gradient are always recomputed. They make tables that code caches, so a run and its recompute make
    different numbers of such calls, and a replayed result of another call could become a table.
    """
    spec: list[Any] = [op, torch.is_grad_enabled()]
    needs_gradient = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                needs_gradient |= each.requires_grad
                spec += _size(each), each.dtype, each.requires_grad
            elif type(each) in _NUMBERS:
                spec.append(each)
    return tuple(spec) if needs_gradient else None


_NUMBERS = (bool, int, float, complex, str)


def _size(tensor: torch.Tensor) -> Any:
    if tensor.is_nested and tensor.layout is torch.strided:  # has no shape, since its parts have different shapes
        return tensor.dim()
    return tensor.shape


class OperatorEffects(NamedTuple):
    """The side effects of a call of an operator.

    Attributes:
        statistics: copies of the running statistics that the call updated, after the call.
        random: the generators that the call drew from, with their states after the call.
    """

    statistics: list[torch.Tensor]
    random: list[tuple[torch.Generator, Any]]

    @classmethod
    def by(cls, op: internals.OpOverload, args: Any, kwargs: Any, result: Any) -> OperatorEffects:
        """Returns the side effects of the call of `op` that has just returned `result`."""
        statistics = [each.clone() for each in running_statistics(op, args, kwargs)]
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return cls(statistics, [])
        generators = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        if not generators:
            indices = {tensor.device.index for tensor in pytrees.tensors(result) if tensor.is_cuda}
            generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
        return cls(statistics, [(each, state_of(each)) for each in generators])


NO_EFFECTS = OperatorEffects([], [])


def has_effects(op: internals.OpOverload) -> bool:
    """Whether a call of `op` may draw random numbers or update running statistics."""
    names = [argument.name for argument in op._schema.arguments]
    return "running_mean" in names or torch.Tag.nondeterministic_seeded in op.tags


class SavedResult:
    """The saved result of one call of an operator.

    Attributes:
        op: the operator.
        call: the number of the call among the recorded ones.
        tier: the tier that holds the outputs until backward; `None` means their device.
        outputs: the tensors of the result, until `seal`.
    """

    __slots__ = ("_aliases", "_constants", "_is_copied", "_left", "_saved", "call", "op", "outputs", "tier")

    def __init__(
        self,
        op: internals.OpOverload,
        call: int,
        tier: str | None,
        result: Any,
        left: OperatorEffects,
        alias: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.op = op
        self.call = call
        self.tier = tier
        # Some kernels return sizes and seeds besides tensors. `_constants` is `None` for a single output.
        is_single = not isinstance(result, (tuple, list))
        self._constants = None if is_single else [None if isinstance(o, torch.Tensor) else (o,) for o in result]
        tensors = [each for each in ([result] if is_single else result) if isinstance(each, torch.Tensor)]
        self.outputs: list[torch.Tensor] = [alias(output) for output in tensors]
        self._aliases = [(output, version(output)) for output in self.outputs]
        self._is_copied = False
        self._left = left
        self._saved: SavedTensors | None = None

    def add_alias(self, alias: torch.Tensor) -> None:
        """Watches the version of `alias`, which shares the memory of an output but not its version counter."""
        if not self._is_copied:
            self._aliases.append((alias, version(alias)))

    def copy(self) -> None:
        """Replaces the outputs by copies, before an operator changes an output in place."""
        if not self._is_copied:
            self._is_copied = True
            self.outputs = [output.clone() for output in self.outputs]
            self._aliases = []

    def forget_unmoved(self, moved: Collection[torch.Generator]) -> None:
        """Drops the states of all generators except `moved`."""
        random = [(generator, state) for generator, state in self._left.random if generator in moved]
        self._left = self._left._replace(random=random)

    def seal(self, hooks: Hooks | None) -> None:
        """Hands the outputs, after the run, to `hooks`, or else to the saved-tensor hooks around the region."""
        versions = [tensor._version for tensor in self.outputs]
        outputs, self.outputs = self.outputs, []
        self._saved = SavedTensors(outputs, (hooks.pack, hooks.unpack) if hooks is not None else hooks_around())
        self._saved.seal(versions)
        if self._saved.through_hooks(0):  # an alias would keep memory that the hooks free
            self._aliases = []
        self._aliases = [(alias, version(alias)) for alias, _ in self._aliases]

    @property
    def is_by_recompute(self) -> bool:
        """Whether the outputs come back by a recompute of the region around this one."""
        return self._saved is not None and self._saved.by_recompute

    def tensors(self) -> list[torch.Tensor]:
        """Returns the outputs, brought back from the hooks."""
        assert self._saved is not None
        return self._saved.tensors()

    @property
    def is_changed(self) -> bool:
        """Whether an output was changed in place since the run."""
        return any(version(alias) != then for alias, then in self._aliases)

    @property
    def moves_statistics(self) -> bool:
        """Whether the operator updated running statistics."""
        return bool(self._left.statistics)

    def again(self, outputs: list[torch.Tensor], statistics: list[torch.Tensor]) -> Any:
        """Returns the result made of `outputs`, and sets statistics and generators to their states after the call."""
        for generator, state in self._left.random:
            restore_state(generator, state)
        for each, then in zip(statistics, self._left.statistics, strict=False):
            each.data.copy_(then)  # through `.data`, since the operator itself increments no version
        # Autograd makes the returned tensor part of the recompute's graph, and the region may change it in place.
        copy = torch.Tensor.clone if self._is_copied else torch.Tensor.detach
        remaining = iter([copy(output) for output in outputs])
        if self._constants is None:
            return next(remaining)
        return tuple(next(remaining) if constant is None else constant[0] for constant in self._constants)


class Results:
    """The saved results of one run of a region, by call.

    A call is identified by its `CallSpec` and by the number of earlier calls with the same spec. So a call that only
    the run or only the recompute makes (to fill a cache, say) shifts no calls with another spec. `expected` tells a
    recompute whether calls with the same spec were shifted.

    Attributes:
        by_call: maps each spec with saved results to {number of earlier calls with this spec: result}.
        weights: maps each of these specs to a power of 2**32; the sum over calls encodes the number of calls per spec.
        expected: for each tensor that autograd saved, the sum of the weights of all earlier calls.
    """

    def __init__(self, calls: list[CallSpec], results: Collection[SavedResult], marks: list[int]) -> None:
        """Indexes the results.

        Args:
            calls: the recorded calls of the run, in order.
            results: the saved results of these calls.
            marks: for each tensor that autograd saved, the number of recorded calls before it.
        """
        by_number = {result.call: result for result in results}
        self.by_call: dict[CallSpec, dict[int, SavedResult]] = {calls[number]: {} for number in by_number}
        self.weights = {spec: 1 << (32 * at) for at, spec in enumerate(self.by_call)}
        seen: Counter[CallSpec] = Counter()
        sums = [0]
        for number, spec in enumerate(calls):
            if spec in self.by_call:
                if number in by_number:
                    self.by_call[spec][seen[spec]] = by_number[number]
                seen[spec] += 1
            sums.append(sums[-1] + self.weights.get(spec, 0))
        self.expected = [sums[mark] for mark in marks]
        self.ops = frozenset(result.op for result in results)

    def __iter__(self) -> Iterator[SavedResult]:
        for results in self.by_call.values():
            yield from results.values()


def seal_all(results: list[SavedResult], calls: list[CallSpec], runtime: Runtime | None) -> None:
    """Hands the outputs of all `results` to saved-tensor hooks."""
    around = hooks_around()
    if results and around is not None and recomputes(around[1]):
        # A recompute around this region matches saved tensors by position and compares their shapes. A tensor whose
        # size is a hash of the saved calls shows the recompute that this region saves other results.
        with unrecorded():
            around[0](torch.empty(0, hash(tuple(calls[result.call] for result in results)) & 0x7FFFFFFF))
    tiers = {result.tier for result in results if result.tier is not None}
    moving = {tier: hooks_here(runtime, tier, 0) for tier in tiers}
    for result in results:
        result.seal(None if result.tier is None else moving[result.tier])
    for hooks in moving.values():
        if hooks is not None:
            hooks.leave()
