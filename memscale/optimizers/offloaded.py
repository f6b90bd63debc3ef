"""`offload_states`: keeps the states of an optimizer on a tier below the device, and runs its step there."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from memscale.algebra import Transform
from memscale.core import by_name, check_tier
from memscale.optimizers.in_groups import at_most
from memscale.optimizers.on_disk import OnDisk
from memscale.optimizers.on_host import Below, StepOnHost, is_large
from memscale.optimizers.step_parts import Group, PartedOptimizer, StepPart, copied, in_turn
from memscale.optimizers.transformed import OptimizerTransform
from memscale.runtime import Runtime

_GROUP_BYTES = 2**22  # bytes of parameters per group; the next group's copies run while one group steps


@dataclasses.dataclass(frozen=True, repr=False)
class OffloadStates(OptimizerTransform):
    """See `offload_states`."""

    spelling: ClassVar[str] = "offload_states"
    uses_runtime: ClassVar[bool] = True

    tier: str = "auto"

    @property
    def moves(self) -> bool:
        return True

    def own_runtime(self) -> Runtime | None:
        """The runtime given with `.on(runtime)`, or None for the process's own."""
        return None

    def on(self, runtime: Any) -> Transform:
        return self if runtime is None else _OffloadStatesOn(self.tier, runtime)

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        below = Below(self.own_runtime(), repr(OffloadStates(self.tier)))
        on_host = StepOnHost(self, optimizer, inner, below)
        return (OnDisk if self.tier == "disk" else _Offloaded)(self, optimizer, on_host, below)


@dataclasses.dataclass(frozen=True, repr=False)
class _OffloadStatesOn(OffloadStates):
    """`OffloadStates` with a runtime. A plan never contains this class, because data holds no resources."""

    runtime: Any = None

    def own_runtime(self) -> Runtime | None:
        return self.runtime  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"{OffloadStates(self.tier)!r}.on({self.runtime!r})"


@by_name
def offload_states(*, tier: str = "auto") -> OptimizerTransform:
    """An optimizer transform that keeps states on a tier below the device, in RAM or on disk, and steps there.

    The states are CPU tensors over the tier's memory, so `state_dict` and other code see them as usual:

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(2**18))
    >>> optimizer = ms.offload_states()(torch.optim.AdamW([weight], fused=True))
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> runtime = ms.runtime.default_runtime()
    >>> runtime.stats()["cpu"].live_bytes["disk"] >= 2 * 2**20  # two moments of 1 MiB
    True
    >>> trace = ms.measure(optimizer.step)
    >>> trace.growth_bytes < 1024
    True

    On a CPU the tier below RAM is the disk. The states are a memory-mapped file, of which the operating system keeps as
    much in RAM as there is room for, and the step is the optimizer's own, bit for bit. With ``tier="disk"`` no state
    stays in RAM: the states of a parameter are read before it steps and written afterwards, pipelined over three
    parameters, and `state_dict` reads all of them.

    On an accelerator gradients and weights are copied to the host, the step runs there (with PyTorch's fused CPU kernel
    where there is one), and weights are copied back: bit for bit the step of that optimizer over CPU parameters. In
    ``compose(step_in_backward(), offload_states())`` each parameter does so as soon as its gradient is complete, while
    backward goes on, and no gradient stays on the device.

    Args:
        tier: the first tier to try: ``"pinned"``, ``"pageable"``, ``"disk"``, or ``"auto"`` for the nearest tier that
            the device has. If a tier is full, the next one below is used. ``.on(runtime)`` selects another
            `memscale.runtime.Runtime`, with its caps, than the process's own.

    Raises:
        ConfigError: `tier` is not a tier.
        RuntimeUnavailable: when states are moved, if no tier has room, or no backend here moves tensors of their
            device.
        TransformError: on application, if the optimizer does not treat each parameter alone (LBFGS), or a parameter is
            a tensor subclass, such as a sharded one.

    Cost: saves all states of at least a page; pays disk transfers where RAM does not hold them, and on an accelerator
    copies of the gradients (once) and the weights (twice) per step, which overlap with other parameters' steps.

    Source: Ren et al., "ZeRO-Offload" (2021), section 4; Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.
    """
    check_tier("offload_states(tier=...)", tier)
    return OffloadStates(tier)


class _Offloaded(StepPart):
    """Keeps states in the memory of a tier, where the step runs over them."""

    places_states: ClassVar[bool] = True

    def __init__(self, how: OffloadStates, optimizer: PartedOptimizer, inner: StepPart, below: Below) -> None:
        super().__init__(how, optimizer, inner)
        self._below = below
        self._placed: dict[int, dict[str, torch.Tensor]] = {}  # by the id of the parameter

    def attend(self, parameters: list[torch.Tensor]) -> None:
        super().attend(parameters)
        self._below.check(parameters, self.optimizer)
        present = {id(parameter) for parameter in parameters}
        self._placed = {key: states for key, states in self._placed.items() if key in present}
        self._place(parameters)

    def below(self) -> list[torch.Tensor]:
        return [tensor for states in self._placed.values() for tensor in states.values() if is_large(tensor)]

    def advance(self, group: Group) -> None:
        few = list(at_most(_GROUP_BYTES, group["params"]))
        for position, now in enumerate(in_turn(group, few)):
            self.inner.ask([parameter for some in few[position : position + 2] for parameter in some])
            self.inner.advance(now)
            self._place(few[position])

    def _place(self, parameters: list[torch.Tensor]) -> None:
        """Moves those states of `parameters` to the tier that are not there yet."""
        optimizer = self.optimizer
        for parameter in parameters:
            states = optimizer.state.get(parameter)
            if not isinstance(states, dict):
                continue
            placed = self._placed.setdefault(id(parameter), {})
            new = {key: value for key, value in states.items() if placed.get(key) is not value}
            if any(isinstance(value, torch.Tensor) for value in new.values()):
                optimizer._shared.pop(id(parameter), None)
                moved = {key: self._moved(value, parameter, placed.get(key)) for key, value in new.items()}
                optimizer.state[parameter] = {**states, **moved}
                placed.update({key: value for key, value in moved.items() if isinstance(value, torch.Tensor)})

    def _moved(self, value: Any, parameter: torch.Tensor, room: torch.Tensor | None) -> Any:
        """Returns a state on its tier: written to `room` if that has its shape and type, else to new memory."""
        if not is_large(value):
            return copied(value, device="cpu")
        if room is not None and (room.shape, room.dtype) == (value.shape, value.dtype):
            return room.copy_(value.detach())
        return self._below.moved(value, parameter, self.how.tier)
