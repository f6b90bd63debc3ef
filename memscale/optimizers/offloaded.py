"""`offload_states`: what an optimizer keeps lives on another tier, and its step runs there."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from memscale.algebra import Transform
from memscale.core import RuntimeUnavailable, check_tier, device_type
from memscale.optimizers.in_groups import at_most
from memscale.optimizers.transformed import Group, OptimizerTransform, Part, TransformedOptimizer, copied
from memscale.runtime import Runtime, runtime_for
from memscale.runtime.parameters import MappedTensors

_LEAST_BYTES = 4096  # a page: what is smaller stays where it is, counts of steps above all
_GROUP_BYTES = 2**24  # of parameters, so that states that are new leave before the next ones are made
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)  # AdamW is an Adam


@dataclasses.dataclass(frozen=True, repr=False)
class OffloadStates(OptimizerTransform):
    """See `offload_states`."""

    spelling: ClassVar[str] = "offload_states"
    uses_runtime: ClassVar[bool] = True

    tier: str = "auto"

    def own_runtime(self) -> Runtime | None:
        """The runtime that it was put on, if any."""
        return None

    def on(self, runtime: Any) -> Transform:
        """See `Transform.on`."""
        return self if runtime is None else _OffloadStatesOn(self.tier, runtime)

    def part(self, optimizer: TransformedOptimizer, inner: Part) -> Part:
        """See `OptimizerTransform.part`."""
        return _Offloaded(self, optimizer, inner)


@dataclasses.dataclass(frozen=True, repr=False)
class _OffloadStatesOn(OffloadStates):
    """The same with a runtime of its own. A means to apply it: what goes into a plan holds no resources."""

    runtime: Any = None

    def own_runtime(self) -> Runtime | None:
        """See `OffloadStates.own_runtime`."""
        return self.runtime  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"{OffloadStates(self.tier)!r}.on({self.runtime!r})"


def offload_states(*, tier: str = "auto") -> OptimizerTransform:
    """An optimizer transform: states live below the device, in RAM or on disk, and the step runs where they are.

    The states are CPU tensors over memory of the tier, so that `state_dict` and all else see them as ever:

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(2**18))
    >>> optimizer = ms.offload_states()(torch.optim.AdamW([weight], fused=True))
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> runtime = ms.runtime.default_runtime()
    >>> runtime.stats()["cpu"].live_bytes  # two moments of 1 MiB
    {'disk': 2097152}
    >>> trace = ms.measure(optimizer.step)
    >>> trace.growth_bytes < 1024
    True

    On a CPU the tier below RAM is the disk; the step is the optimizer's own, bit for bit, over memory that the system
    reads ahead and writes back while it runs. On an accelerator gradients and weights come to the host, the step runs
    there, with the fused kernel for the CPU where PyTorch has one, and weights go back: bit for bit the step of that
    optimizer over parameters on the CPU. With `step_in_backward` each does so when its gradient is complete, and no
    gradient stays on the device: ``compose(step_in_backward(), offload_states())``.

    Args:
        tier: the first tier to try, ``"pinned"``, ``"pageable"`` or ``"disk"``; ``"auto"`` is the nearest that the
            device has. One that is full leaves it to the next below. Use ``.on(runtime)`` for another
            `memscale.runtime.Runtime` than the process's own, with its caps.

    Raises:
        ConfigError: `tier` is no tier.
        RuntimeUnavailable: when states are moved: no tier has room for them, or nothing here moves tensors of their
            device.
        TransformError: when it is applied, if the optimizer does not treat each parameter alone (LBFGS).

    Cost: saves all states but those smaller than a page; pays the disk where RAM does not hold them too, and on an
    accelerator the link, twice the weights and once the gradients in each step.

    Source: Ren et al., "ZeRO-Offload" (2021), section 4; Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.
    """
    check_tier("offload_states(tier=...)", tier)
    return OffloadStates(tier)


class _Offloaded(Part):
    def __init__(self, how: OffloadStates, optimizer: TransformedOptimizer, inner: Part) -> None:
        super().__init__(optimizer, inner)
        self.how = how
        self._memories: dict[torch.device, MappedTensors] = {}
        self._placed: dict[int, dict[str, torch.Tensor]] = {}  # by the id of the parameter

    def attend(self, parameters: list[torch.Tensor]) -> None:
        """See `Part.attend`."""
        present = {id(parameter) for parameter in parameters}
        self._placed = {key: states for key, states in self._placed.items() if key in present}
        self._place(parameters)

    def below(self) -> list[torch.Tensor]:
        """See `Part.below`."""
        there = [tensor for states in self._placed.values() for tensor in states.values()]
        return [tensor for tensor in there if tensor.nbytes >= _LEAST_BYTES]

    def advance(self, groups: list[Group]) -> None:
        """See `Part.advance`."""
        for group in groups:
            for few in at_most(_GROUP_BYTES, group["params"]):
                on_host = [parameter for parameter in few if device_type(parameter) == "cpu"]
                options = {key: value for key, value in group.items() if key != "params"}
                now = {**options, "params": on_host}
                if on_host:
                    self.inner.advance([now])
                if len(on_host) < len(few):
                    ids = set(map(id, on_host))
                    now = {**options, "params": [parameter for parameter in few if id(parameter) not in ids]}
                    self._advance_on_host(now)
                self._place(few)
            group.update({**now, "params": group["params"]})

    def _advance_on_host(self, group: Group) -> None:
        """Step parameters of an accelerator on the CPU."""
        optimizer, parameters = self.optimizer, group["params"]
        state: Any = optimizer.state
        there = {"capturable": False} if "capturable" in group else {}
        if issubclass(optimizer._own_class, _FUSED_ON_CPU):
            there |= {"foreach": False, "fused": True}
        twins = [self._moved(parameter, parameter, "auto") for parameter in parameters]
        for parameter, twin in zip(parameters, twins, strict=True):
            twin.grad = self._moved(parameter.grad, parameter, "auto")
            if parameter in state:
                state[twin] = state[parameter]
        now = {**group, **there, "params": twins}
        try:
            self.inner.advance([now])
        finally:
            states = [state.pop(twin, None) for twin in twins]
        with torch.no_grad():
            for parameter, twin, states_of_it in zip(parameters, twins, states, strict=True):
                parameter.copy_(twin)
                if states_of_it is not None:
                    state[parameter] = states_of_it
        group.update({key: value for key, value in now.items() if key not in (*there, "params")})

    def _place(self, parameters: list[torch.Tensor]) -> None:
        """Move states of these parameters that are not where they belong yet."""
        optimizer = self.optimizer
        for parameter in parameters:
            states = optimizer.state.get(parameter)
            if not isinstance(states, dict):
                continue
            placed = self._placed.setdefault(id(parameter), {})
            new = {key: value for key, value in states.items() if placed.get(key) is not value}
            if id(parameter) in optimizer._shared or any(isinstance(value, torch.Tensor) for value in new.values()):
                optimizer._shared.discard(id(parameter))
                moved = {key: self._placed_state(value, parameter, placed.get(key)) for key, value in new.items()}
                optimizer.state[parameter] = {**states, **moved}
                placed.update({key: value for key, value in moved.items() if isinstance(value, torch.Tensor)})

    def _placed_state(self, value: Any, parameter: torch.Tensor, room: torch.Tensor | None) -> Any:
        """A state on its tier: in `room`, where that has its shape, or in new room."""
        if not isinstance(value, torch.Tensor) or value.nbytes < _LEAST_BYTES or value.layout is not torch.strided:
            return copied(value, device="cpu")
        if room is not None and (room.shape, room.dtype) == (value.shape, value.dtype):
            return room.copy_(value.detach())
        return self._moved(value, parameter, self.how.tier)

    def _moved(self, value: torch.Tensor, parameter: torch.Tensor, tier: str) -> torch.Tensor:
        """`value` as a CPU tensor over memory of `tier`, or of the next below that has room."""
        found = self._memory(parameter).take(value.nbytes, tier)
        if found is None:
            raise RuntimeUnavailable(
                f"{self.how!r}: no tier has room for {value.nbytes} bytes; raise the caps of the runtime (disk_bytes, "
                "host_bytes), or leave this transform out"
            )
        strides = torch.empty_like(value, device="meta").stride()  # dense, in the order of the tensor's own
        room = found[1].view(value.dtype).as_strided(value.shape, strides).detach()
        return room.copy_(value.detach())

    def _memory(self, parameter: torch.Tensor) -> MappedTensors:
        device = parameter.device
        if device not in self._memories:
            self._memories[device] = runtime_for(self.how.own_runtime()).homes(parameter).new_memory()
        return self._memories[device]
