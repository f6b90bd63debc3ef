"""`verify`: runs one step of two modules on the same batch, from the same state, and compares every number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import ConfigError, CorrectnessError, Loss, aligned, batches, tensors, unflatten
from memscale.regions import Captures, without_side_effects

_INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_WORST = 8  # lines in a report
# The largest relative difference that another order of sums explains: about 400 units in the last place of float32 and
# float64, and 15 of 16-bit types, whose kernels sum in float32 and round once. Under `tile`, 24 blocks of a Llama
# differ by 7e-7, 12 of a GPT-2 in bfloat16 by 0.05, 40 convolutions by 8e-6 (`test_the_verdict_of_deep_models`).
_ROUNDING = {torch.float64: 1e-13, torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# The least scale for differences, as a share of the step's largest gradient. A gradient that is zero except for
# rounding (of a bias before a softmax) gives no scale.
_LEAST_SCALE = 0.01


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of one tensor of a step between two modules.

    Attributes:
        name: ``"output 0"``, ``"gradient of layers.0.weight"``, ``"gradient of input 0"``, ``"buffer norm.mean"`` or
            ``"the random state"`` (on a GPU also ``"the random state of cuda:0"``).
        bitwise: whether both have the same bits; NaN then equals itself, and -0.0 differs from 0.0.
        max_abs: the largest absolute difference of two elements; infinite if one of them is NaN.
        max_ulps: the largest difference of two elements, in units in the last place of these elements.
        max_ulps_of_largest: `max_abs` in units in the last place of the largest element. Another order of sums gives
            small values here, but large `max_ulps` where elements cancel to almost zero.
        mismatch: why elements cannot be compared (another dtype or shape, a gradient on one side only), or ``""``.
            With a mismatch all numbers are infinite.
        max_relative: `max_abs` divided by the largest element of the tensor; for a gradient, by at least a hundredth of
            the largest gradient of the step.
        dtype: the dtype of the model's tensor, as ``"float32"``.
        rounding: the largest `max_relative` that another order of sums explains; 0 for integers.
    """

    name: str
    bitwise: bool
    max_abs: float = 0.0
    max_ulps: float = 0.0
    max_ulps_of_largest: float = 0.0
    mismatch: str = ""
    max_relative: float = 0.0
    dtype: str = ""
    rounding: float = 0.0

    def __str__(self) -> str:
        if self.mismatch:
            return f"{self.name}: {self.mismatch}"
        return (
            f"{self.name}: {self.max_abs:.3g} at most, {self.max_ulps:.3g} ulps, "
            f"{self.max_ulps_of_largest:.3g} ulps of its largest element"
        )


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. Prints the verdict, followed by the worst differences.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Linear(2, 2)
    >>> found = ms.verify(model, ms.transform(model, {"": ms.checkpoint()}), torch.ones(1, 2))
    >>> isinstance(found, ms.Verification), found.exact
    (True, True)
    """

    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        """Whether every result has the same bits."""
        return all(difference.bitwise for difference in self.differences)

    @property
    def rounds_only(self) -> bool:
        """Whether results differ, but none by more than another order of sums explains.

        >>> import torch, memscale as ms
        >>> model = torch.nn.Linear(2, 2)
        >>> wrong = torch.nn.Linear(2, 2)
        >>> ms.verify(model, wrong, torch.ones(1, 2)).rounds_only
        False
        """
        return not self.exact and all(d.max_relative <= d.rounding for d in self.different)

    @property
    def verdict(self) -> str:
        """The verdict in a line: equal, rounding only, or different, with the deciding result."""
        total = len(self.differences)
        if self.exact:
            return f"equal, bit for bit: {total} results of the step"
        worst = max(self.different, key=lambda d: d.max_relative / d.rounding if d.rounding else math.inf)
        count = f"{len(self.different)} of {total} results differ"
        if self.rounds_only:
            return (
                f"rounding only: worst relative difference {worst.max_relative:.1g} "
                f"(expected at most {worst.rounding:.0e} in {worst.dtype}); {count}"
            )
        why = worst.mismatch or f"relative difference {worst.max_relative:.1g}"
        bound = f" (rounding explains {worst.rounding:.0e} in {worst.dtype})" if worst.rounding else ""
        return f"DIFFERENT: {worst.name}, {why}{bound}; {count}"

    @property
    def different(self) -> tuple[Difference, ...]:
        """The results whose bits differ, worst first."""
        found = [difference for difference in self.differences if not difference.bitwise]
        return tuple(sorted(found, key=lambda d: (-d.max_ulps_of_largest, -d.max_ulps)))

    def within(self, *, ulps: float, of: str = "element") -> bool:
        """Whether all differences are at most `ulps` units in the last place.

        Args:
            ulps: the bound, in units in the last place.
            of: the number whose last place is meant: each ``"element"`` itself, or the ``"largest"`` of its tensor.

        Raises:
            ConfigError: `of` is neither of the two.
        """
        return not self._beyond(ulps, of)

    def raise_if_different(self, *, ulps: float = 0, of: str = "element") -> None:
        """Raises an error unless all results are `within` the bound; by default they must have the same bits.

        Raises:
            CorrectnessError: results differ by more; the message names the worst.
            ConfigError: as `within`.
        """
        if not (beyond := self._beyond(ulps, of)):
            return
        bound = f"by more than {ulps:g} ulps of {'each element' if of == 'element' else 'the largest element'} "
        raise CorrectnessError(
            f"{len(beyond)} of {len(self.differences)} results of the step differ {bound if ulps else ''}from the "
            f"model's: {'; '.join(map(str, beyond[:3]))}{'; ...' if len(beyond) > 3 else ''}. Transform less of the "
            "model to find the region, or allow for rounding with raise_if_different(ulps=...)"
        )

    def _beyond(self, ulps: float, of: str) -> list[Difference]:
        if of not in ("element", "largest"):
            raise ConfigError(f"within(of=...) is 'element' or 'largest', got {of!r}")
        if ulps == 0:
            return list(self.different)
        return [d for d in self.different if (d.max_ulps if of == "element" else d.max_ulps_of_largest) > ulps]

    def __str__(self) -> str:
        if self.exact:
            return self.verdict
        rows: list[tuple[str, ...]] = [("differs", "max abs", "max ulps", "ulps of largest")]
        for d in self.different[:_WORST]:
            numbers = [f"{number:.3g}" for number in (d.max_abs, d.max_ulps, d.max_ulps_of_largest)]
            rows.append((d.name, d.mismatch, "", "") if d.mismatch else (d.name, *numbers))
        more = len(self.different) - _WORST
        return "\n".join([self.verdict, *aligned(rows, "<<<<"), *([f"... and {more} more"] if more > 0 else [])])


def verify(model: nn.Module, transformed: nn.Module, batch: Any, *, loss: Loss | None = None) -> Verification:
    """Runs a step of both modules on `batch` and compares outputs, gradients, buffers and the random state.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    >>> fit = ms.transform(model, {"*": ms.checkpoint()})
    >>> print(ms.verify(model, fit, torch.ones(3, 4)))
    equal, bit for bit: 6 results of the step
    >>> ms.verify(model, ms.transform(model, {"*": ms.cast()}), torch.ones(3, 4)).exact
    False

    Both modules start from the same random state and from their own parameters and buffers (which `transform` shares).
    The step leaves parameters, gradients, buffers, attributes and random states unchanged, also after an exception.

    Args:
        model: the reference.
        transformed: the module to compare with it; gradients and buffers are matched by name.
        batch: a tensor is one positional argument, a tuple or list positional arguments, a mapping keyword arguments.
            For tensors that require a gradient, the gradients are compared too.
        loss: ``loss(output, batch)``, a scalar tensor. `None` uses the output's ``loss``; an output without one is
            weighted by fixed numbers and summed, so that a gradient reaches all of it.

    Raises:
        ConfigError: `batch` is none of these, `loss` did not return a scalar tensor, or an argument is not a module.
        Exception: any error that a module raises.

    Cost: two steps without an optimizer; keeps both gradients, and a copy of parameters and buffers, until it returns.
    """
    for name, module in (("model", model), ("transformed", transformed)):
        if not isinstance(module, nn.Module):
            remedy = "; write transform(model, plan)" if isinstance(module, (Plan, Mapping)) else ""
            raise ConfigError(f"verify({name}=...) takes a torch.nn.Module, got {type(module).__name__}{remedy}")
    batches.check_call(model, batch)
    batches.check_loss(loss)
    for name, given in (("model", model), ("transformed", transformed), ("batch", batch)):
        found = [*given.parameters(), *given.buffers()] if isinstance(given, nn.Module) else tensors(given)
        if any(tensor.is_meta for tensor in found):
            raise ConfigError(
                f"verify({name}=...) runs a step for real, and a tensor on meta has no numbers; make it on a device, "
                "with fewer layers where the model is too large"
            )
    return compare(results_of_step(model, batch, loss), results_of_step(transformed, batch, loss))


def check_same_numbers(model: nn.Module, apply: Callable[[], object], undo: Callable[[], object], batch: Any) -> None:
    """Runs a step of `model` on `batch` before and after ``apply()``; both must give the same bits.

    Compares outputs, gradients, buffers and the random state, and leaves all of them unchanged. If results differ,
    ``undo()`` runs before the error is raised.

    Raises:
        CorrectnessError: results differ; the message names them.
    """
    plain = results_of_step(model, batch)
    apply()
    found = compare(plain, results_of_step(model, batch))
    if found.exact:
        return
    undo()
    # Atomic adds on a GPU differ from run to run even without a plan, which has another remedy.
    if not compare(plain, results_of_step(model, batch)).exact:
        raise CorrectnessError(
            f"two plain steps of this {type(model).__name__} differ from each other, so a comparison proves nothing; "
            f"call torch.use_deterministic_algorithms(True) or turn verify_correctness off"
        )
    raise CorrectnessError(
        f"the wrapped step differs from the plain one in {', '.join(d.name for d in found.different)}; "
        "the model is left unwrapped. "
        "Its forward may depend on state that memscale cannot restore (a file, a clock, another random generator)"
    )


def results_of_step(model: nn.Module, batch: Any, loss: Loss | None = None) -> dict[str, torch.Tensor | None]:
    """Returns the results of one forward and backward of `model` by name, and leaves the model unchanged."""
    leaves, spec = batches.flatten(batch)
    inputs = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    captures = Captures(model, follows=True)
    own = list({id(tensor): tensor for _, _, tensor in captures.tensors}.values())
    with without_side_effects(captures, own, own, computes=True), torch.enable_grad():
        trained = {
            **{f"gradient of {name}": p for name, p in model.named_parameters() if p.requires_grad},
            **{f"gradient of input {at}": leaf for at, leaf in enumerate(tensors(inputs)) if leaf.requires_grad},
        }
        given = unflatten(spec, inputs)
        output = batches.call(model, given)
        outputs = tensors(output)
        total = _loss(output, outputs, loss, given)
        # `torch.autograd.grad`, since `backward` would add to the caller's gradients and run hooks of optimizers.
        gradients: Sequence[torch.Tensor | None] = [None] * len(trained)
        if total is not None and trained:
            gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        cards = sorted({p.device for p in model.parameters() if p.is_cuda}, key=str)
        return {
            **{f"output {at}": tensor.detach().clone() for at, tensor in enumerate(outputs)},
            **({"the loss": total.detach().clone()} if loss is not None and total is not None else {}),
            **dict(zip(trained, gradients, strict=True)),
            **{f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()},
            "the random state": torch.get_rng_state(),
            **{f"the random state of {card}": torch.cuda.get_rng_state(card) for card in cards},
        }


def _loss(output: Any, outputs: list[torch.Tensor], loss: Loss | None, batch: Any) -> torch.Tensor | None:
    if loss is not None:
        value = batches.given_loss(output, batch, loss)
        return value if value.requires_grad else None
    own = batches.own_loss(output)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own.sum()
    # Different weights, since the plain sum of a normalised output is constant and has no gradient.
    terms = [
        (tensor * torch.linspace(-1, 1, tensor.numel(), device=tensor.device).reshape(tensor.shape)).sum().real
        for tensor in outputs
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    ]
    return torch.stack([term.double() for term in terms]).sum() if terms else None


def compare(model: Mapping[str, torch.Tensor | None], other: Mapping[str, torch.Tensor | None]) -> Verification:
    """Compares the results of two steps, name by name."""
    gradients = {name: value for name, value in model.items() if name.startswith("gradient of ")}
    least = _LEAST_SCALE * max(map(_largest, gradients.values()), default=0.0)
    pairs = {name: (model.get(name), other.get(name)) for name in {**model, **other}}
    return Verification(
        tuple(_difference(name, *pair, least if name in gradients else 0.0) for name, pair in pairs.items())
    )


def _difference(name: str, one: torch.Tensor | None, other: torch.Tensor | None, least_scale: float) -> Difference:
    def incomparable(why: str) -> Difference:
        return Difference(name, False, math.inf, math.inf, math.inf, why, math.inf)

    if one is None and other is None:
        return Difference(name, bitwise=True)
    if one is None or other is None:
        return incomparable(f"only the {'model' if other is None else 'transformed module'} has one")
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return incomparable(f"{_kind(one)} became {_kind(other)}")
    one, other = (_plain(tensor) for tensor in (one, other))
    # As bytes, because NaN differs from itself and -0.0 equals 0.0.
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return Difference(name, bitwise=True)
    if name.startswith("the random state"):
        return incomparable("other random numbers were drawn")
    gap = (one.double() - other.double()).abs()
    gap[(one == other) | (one.isnan() & other.isnan())] = 0  # equal infinities, whose difference is NaN
    max_abs = float(gap.nan_to_num(math.inf).max())
    scale = max(_largest(one), least_scale)
    relative = max_abs / scale if scale else (math.inf if max_abs else 0.0)
    ulps, ulps_of_largest = max_abs, max_abs  # of integers
    if one.is_floating_point():
        steps = _ordinals(one, other)
        steps[one.isnan() != other.isnan()] = math.inf
        steps[one.isnan() & other.isnan()] = 0
        ulps, ulps_of_largest = float(steps.max()), max_abs / _ulp(one)
    dtype, rounding = str(one.dtype).removeprefix("torch."), _ROUNDING.get(one.dtype, 0.0)
    return Difference(name, False, max_abs, ulps, ulps_of_largest, "", relative, dtype, rounding)


def _largest(tensor: torch.Tensor | None) -> float:
    """Returns the largest finite magnitude in `tensor`; 0 for `None` or without finite elements."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(_plain(tensor).double().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _kind(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{layout}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` as a flat, dense, real tensor."""
    dense = (tensor.to_dense() if tensor.layout != torch.strided else tensor).resolve_conj().resolve_neg()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.contiguous().reshape(-1)


def _ordinals(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the number of floating point numbers between the elements, as float64."""
    kind = _INTEGER[one.dtype.itemsize]
    lowest = torch.iinfo(kind).min
    a, b = (tensor.view(kind).long() for tensor in (one, other))
    # Negative floats are stored as sign and magnitude; counted down from zero, ordinals have the order of floats.
    a, b = (torch.where(bits < 0, lowest - bits, bits) for bits in (a, b))
    # Across zero the distance of two float64 may overflow an int64; on one side of zero it must be exact.
    return torch.where((a < 0) == (b < 0), (a - b).abs().double(), (a.double() - b.double()).abs())


def _ulp(tensor: torch.Tensor) -> float:
    """Returns the distance from the largest finite magnitude in `tensor` to the next number of its dtype."""
    info = torch.finfo(tensor.dtype)
    return math.ldexp(info.eps, math.frexp(max(_largest(tensor), info.smallest_normal))[1] - 1)
