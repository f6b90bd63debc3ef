"""`quantize_states`: keeps moments in 8 bits between steps, and restores them while their parameter steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from memscale.algebra import Numbers
from memscale.core import ConfigError, TransformError, by_name, format_bytes, simulating
from memscale.optimizers.blockwise import LARGEST, codes_in, kernels, prepare, quantized, restored
from memscale.optimizers.in_groups import at_most
from memscale.optimizers.kernel_step import KernelStep
from memscale.optimizers.separability import MomentState
from memscale.optimizers.step_parts import Group, OwnStep, PartedOptimizer, StepPart, check_whole, copied, in_turn
from memscale.optimizers.transformed import OptimizerTransform

_LEAST = 4096  # states of fewer numbers stay in full: the saving would not be worth the rounding
# Bytes of parameters whose moments are restored at once: 1/_SHARE of all, within [_LEAST_BYTES, _MOST_BYTES], and at
# most 1/_FEWEST of all for small models.
_LEAST_BYTES, _MOST_BYTES, _SHARE, _FEWEST = 2**20, 2**24, 64, 4
_KINDS = (torch.float32, torch.bfloat16, torch.float16)  # the types of moments that the kernels take
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, repr=False)
class QuantizeStates(OptimizerTransform):
    """See `quantize_states`."""

    spelling: ClassVar[str] = "quantize_states"
    own_numbers: ClassVar[Numbers] = "lossy"

    bits: int = 8
    block: int = 256

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        kernels()  # raises RuntimeUnavailable without bitsandbytes
        if any(each.writes_offloaded for each in inner.with_inner()):
            raise TransformError(
                f"{self!r}: a transform inside of it has the moments on disk, where none is rounded; write the one "
                f"outside, as in compose(offload_states(tier='disk'), {self!r})"
            )
        return _Quantized(self, optimizer, inner)


@by_name
def quantize_states(*, bits: int = 8, block: int = 256) -> OptimizerTransform:
    """An optimizer transform that keeps moments in 8 bits between steps, and restores them while their parameter steps.

    The moments take a quarter of their bytes. The numbers change: each moment is rounded after each step.

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(64, 256))
    >>> optimizer = ms.quantize_states()(torch.optim.AdamW([weight]))
    >>> weight.grad = torch.linspace(-1, 1, 64 * 256).view(64, 256)
    >>> optimizer.step()
    >>> sum(tensor.nbytes for tensor in optimizer.state[weight].values()) / (2 * weight.nbytes)
    0.253936767578125
    >>> moment = optimizer.state_dict()["state"][0]["exp_avg"]  # restored, in the plain optimizer's type
    >>> (moment - weight.grad * 0.1).abs().max() < 0.012 * 0.1
    tensor(True)

    The contract: a stored number is its block's largest magnitude times one of 256 shares, the nearest one up to a
    prior rounding to bfloat16. The error is at most 1.2 % of the block's largest, and 0.6 % for states without a sign.
    Zero stays zero, and in a second moment no other number becomes zero. Quantizing a restored number gives the same
    code again, so a `state_dict` loses nothing.

    A moment is a state of its parameter's shape that stays zero while gradients are zero; a trial on small parameters
    finds them when the transform is applied. Other states (counts, factors, copies of weights) stay in full, and so
    do states of parameters with fewer than 4096 numbers. ``print(optimizer.report())`` lists them.

    Args:
        bits: must be 8.
        block: how many numbers share a largest magnitude: 64, 128, 256, 512, 1024, 2048 or 4096.

    Raises:
        ConfigError: `bits` or `block` has another value.
        RuntimeUnavailable: on application, if bitsandbytes is not installed.
        TransformError: on application, if the optimizer does not treat each parameter alone (LBFGS), or the moments are
            on disk already: ``compose(quantize_states(), offload_states(tier="disk"))``.

    On CUDA, Adam, AdamW, SGD with momentum, RMSprop (without momentum) and Adagrad step in one kernel of bitsandbytes
    from their second step on, with no moment in full; other optimizers, and all on a CPU, step by their class over
    restored moments.

    Cost: saves at least three quarters of the moments; pays rounding errors, and passes over the moments in each step.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), section 2.
    """
    if isinstance(bits, bool) or bits != 8:
        raise ConfigError(f"quantize_states(bits={bits!r}) must be 8; other widths have no kernels")
    if isinstance(block, bool) or block not in _BLOCKS:
        raise ConfigError(f"quantize_states(block={block!r}) must be one of {', '.join(map(str, _BLOCKS))}")
    return QuantizeStates(bits, block)


class _Quantized(StepPart):
    works_after: ClassVar[bool] = True
    _at_once = _MOST_BYTES
    _rounds_in_state_dict = False  # whether moments are finer than the type that they have in a `state_dict`

    def attend(self, parameters: list[torch.Tensor]) -> None:
        check_whole(repr(self.how), parameters)
        super().attend(parameters)
        self._counts: dict[
            int, tuple[torch.Tensor, int, int]
        ] = {}  # by parameter: the count of steps, its version and value
        nbytes = sum(parameter.nbytes for parameter in parameters)
        self._at_once = min(max(nbytes // _SHARE, min(_LEAST_BYTES, nbytes // _FEWEST)), _MOST_BYTES)
        for device in {parameter.device for parameter in parameters}:
            prepare(device)
        for parameter in parameters:
            self._shrink(parameter)

    def advance(self, group: Group) -> None:
        for now in in_turn(group, at_most(self._at_once, self._after_kernel(group))):
            first, *others = now["params"]
            if not others and first.nbytes > self._at_once and self._cuts(first):
                self._advance_in_slices(first, now)
            else:
                self._advance_whole(now)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        state: Any = self.optimizer.state
        before = {parameter: state[parameter] for parameter in self.parameters if parameter in state}
        try:
            for parameter in before:
                self._restore(parameter)
            yield
        finally:
            state.update(before)

    def report(self) -> list[str]:
        optimizer, places = self.optimizer, self.optimizer._places()
        before = after = number = 0
        stay: dict[str, list[str]] = {}
        for parameter in self.parameters:
            states = optimizer.state.get(parameter, {})
            codes = codes_in(states)
            number += bool(codes)
            for name, value in codes.items():
                before += value.numel() * self._moments(parameter)[name].dtype.itemsize
                after += value.nbytes + states[f"{name}{LARGEST}"].nbytes
            if not codes:
                stay.setdefault(self._why_not(parameter, states), []).append(places[id(parameter)][1])
        lines = [f"{self.how!r}: moments of {number} parameters, {format_bytes(before)} in {format_bytes(after)}"]
        if self._rounds_in_state_dict:
            lines.append("  of parameters in bfloat16 a state_dict has moments in bfloat16, and the kernel finer ones")
        return lines + [f"  in full, {why}: {', '.join(titles)}" for why, titles in stay.items()]

    def _why_not(self, parameter: torch.Tensor, states: dict[str, Any]) -> str:
        if not states:
            return "since they have not stepped yet"
        if not self._moments(parameter):
            return "since no state is a moment"
        return f"since they have fewer than {_LEAST} numbers" if parameter.numel() < _LEAST else "by type or layout"

    # ------------------------------------------------------------------------------------------------------ stepping

    def _after_kernel(self, group: Group) -> list[torch.Tensor]:
        """Steps those parameters of `group` that one kernel can step, and returns the others."""
        optimizer = self.optimizer
        scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        is_own = isinstance(self.inner, OwnStep) and not scaled
        step = KernelStep.of(optimizer._own_class, group, self.how.block) if is_own else None
        if step is None:
            return list(group["params"])
        rest = []
        for parameter in group["params"]:
            if step.takes(parameter, optimizer.state.get(parameter, {})):
                optimizer._part_states([parameter])
                states = optimizer.state[parameter]
                step.run(parameter, states, self._counted(parameter, states), self._at_once)
                self._rounds_in_state_dict |= parameter.dtype != torch.float32
            else:
                rest.append(parameter)
        return rest

    def _counted(self, parameter: torch.Tensor, states: dict[str, Any]) -> int:
        """Counts a step of `parameter` in `states`, and returns its number."""
        if "step" not in states:
            return 2  # SGD keeps no count, and its first step was by its class
        states["step"] += 1
        steps: torch.Tensor = states["step"]
        if simulating():
            return 2
        # A fused optimizer has the count on the card, where reading it waits for all work before.
        known, version, number = self._counts.get(id(parameter), (None, 0, 0))
        is_next = known is steps and steps._version == version + 1
        number = number + 1 if is_next else int(steps)
        self._counts[id(parameter)] = steps, steps._version, number
        return number

    def _advance_whole(self, group: Group) -> None:
        for parameter in group["params"]:
            self._restore(parameter)
        try:
            self.inner.advance(group)
        finally:
            for parameter in group["params"]:
                self._shrink(parameter)

    def _cuts(self, parameter: torch.Tensor) -> bool:
        """Whether the step may go over slices of `parameter`, each of which is a parameter for that time."""
        evidence, moments = self.optimizer._evidence, self._moments(parameter)
        states = self.optimizer.state.get(parameter, {})
        return (
            evidence.elementwise
            and not any(part.places_states for part in self.inner.with_inner())
            and parameter.numel() >= _LEAST
            and bool(moments)
            and all(moment.dtype in _KINDS for moment in moments.values())
            and evidence.full_names(parameter) == moments.keys()
            and (not states or codes_in(states).keys() >= moments.keys())  # every moment is quantized
            and all(each.is_contiguous() for each in (parameter, parameter.grad) if each is not None)
        )

    def _advance_in_slices(self, parameter: torch.Tensor, group: Group) -> None:
        state: Any = self.optimizer.state
        gradient = parameter.grad
        assert gradient is not None, "it steps"
        options = dict(group)
        before, moments = dict(state.get(parameter, {})), self._moments(parameter)
        flat, flat_gradient, block = parameter.detach().view(-1), gradient.detach().view(-1), self.how.block
        width = max(1, self._at_once // parameter.itemsize // _BLOCKS[-1]) * _BLOCKS[-1]
        found = {name: value for name, value in before.items() if name in moments or name.endswith(LARGEST)}
        small: dict[str, Any] = {}
        for start in range(0, parameter.numel(), width):
            part, blocks = slice(start, start + width), slice(start // block, (start + width) // block)
            twin = flat[part]
            twin.grad_dtype = gradient.dtype
            twin.grad = flat_gradient[part]
            numbers = {
                name: self._numbers(value.view(-1)[part], before[f"{name}{LARGEST}"][blocks], moments[name])
                if name in found
                else copied(value)
                for name, value in before.items()
                if not name.endswith(LARGEST)
            }
            now = {**options, "params": [parameter]}
            [after] = self.advance_twins(now, [twin], [numbers])
            for name, moment in moments.items():
                if name not in found:
                    count = -(-parameter.numel() // block)
                    found[name] = parameter.new_empty(parameter.shape, dtype=torch.uint8)
                    found[f"{name}{LARGEST}"] = parameter.new_empty(count, dtype=torch.float32)
                codes, largest = quantized(after.pop(name).detach().view(-1), block, signed=moment.signed)
                found[name].view(-1)[part] = codes
                found[f"{name}{LARGEST}"][blocks] = largest
            small = {name: value for name, value in after.items() if name not in moments}
            group.update(now)
        state[parameter] = {**small, **found}

    # --------------------------------------------------------------------------------------- quantizing and restoring

    def _moments(self, parameter: torch.Tensor) -> dict[str, MomentState]:
        """Returns the states of `parameter` that are moments, by name."""
        return self.optimizer._evidence.moments_of(parameter, self.inner.states_like(parameter))

    def _shrink(self, parameter: torch.Tensor) -> None:
        """Quantizes those moments of `parameter` that are not quantized yet."""
        optimizer = self.optimizer
        states = optimizer.state.get(parameter)
        if not isinstance(states, dict) or parameter.numel() < _LEAST:
            return
        made: dict[str, torch.Tensor] = {}
        for name, moment in self._moments(parameter).items():
            value = states.get(name)
            if isinstance(value, torch.Tensor) and value.dtype == moment.dtype and _is_dense(value, parameter):
                flat = value.detach().as_strided((value.numel(),), (1,))
                codes, largest = quantized(flat, self.how.block, signed=moment.signed)
                made |= {name: codes.as_strided(value.shape, value.stride()), f"{name}{LARGEST}": largest}
                states = optimizer.state[parameter] = {**states, **made}
                del value, flat  # free this moment before the next one's codes are allocated
        if made:
            optimizer._part_states([parameter])

    def _restore(self, parameter: torch.Tensor) -> None:
        """Replaces the codes in the states of `parameter` by restored moments."""
        states = self.optimizer.state.get(parameter, {})
        moments = self._moments(parameter)
        if not any(name.endswith(LARGEST) for name in states):
            return
        numbers = {
            name: self._numbers(
                value.as_strided((value.numel(),), (1,)), states[f"{name}{LARGEST}"], moments[name]
            ).as_strided(value.shape, value.stride())
            for name, value in codes_in(states).items()
        }
        self.optimizer.state[parameter] = {
            name: numbers.get(name, value) for name, value in states.items() if not name.endswith(LARGEST)
        }

    def _numbers(self, codes: torch.Tensor, largest: torch.Tensor, moment: MomentState) -> torch.Tensor:
        return restored(codes, largest, self.how.block, moment.dtype, signed=moment.signed)


def _is_dense(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether `value` has the parameter's shape and a layout without gaps."""
    if value.layout is not torch.strided or value.shape != parameter.shape or not value.dtype.is_floating_point:
        return False
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.dtype in _KINDS and last + 1 == value.numel()
