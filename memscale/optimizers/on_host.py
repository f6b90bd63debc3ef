"""`StepOnHost`: runs the step of every parameter on the CPU; an accelerator's weights are copied there and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memscale.core import RuntimeUnavailable, TransformError, device_type
from memscale.optimizers.step_parts import Group, PartedOptimizer, StepPart, in_turn
from memscale.runtime import Runtime, host_parameter_of, runtime_for
from memscale.runtime.parameters import HostCopy, Mapped, MappedTensors

_LEAST_BYTES = 4096  # one page; smaller states, such as step counts, stay where they are
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)  # AdamW is a subclass of Adam


class Below:
    """Allocates memory of the tiers below a device, as CPU tensors."""

    def __init__(self, runtime: Runtime | None, title: str) -> None:
        self._given = runtime
        self.title = title
        self._memories: dict[tuple[int, torch.device], MappedTensors] = {}

    @property
    def runtime(self) -> Runtime:
        """The runtime whose tiers are used."""
        return runtime_for(self._given)

    def check(self, parameters: list[torch.Tensor], optimizer: PartedOptimizer) -> None:
        """Raises `TransformError` for parameters or states that are tensor subclasses, such as sharded ones."""
        if parameters and (composed := optimizer._evidence.composed):
            raise TransformError(
                f"{self.title}: the states of this {type(optimizer).__name__} ({', '.join(sorted(composed))}) are made "
                "of several tensors each, which it cannot move; put quantize_states() around an optimizer whose states "
                "are plain tensors, or leave this transform out"
            )
        for parameter in parameters:
            if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
                kind = type(parameter).__name__
                raise TransformError(
                    f"{self.title}: a parameter of shape {list(parameter.shape)} is a {kind}, whose states it cannot "
                    "move; give it an optimizer of its own, or let FSDP2 do it (CPUOffloadPolicy)"
                )

    def room(self, nbytes: int, parameter: torch.Tensor, tier: str) -> torch.Tensor:
        """Allocates `nbytes` on `tier` of the device of `parameter`, or on the next tier below that has room.

        Raises:
            RuntimeUnavailable: no tier has room.
        """
        return self._take(nbytes, parameter, tier)[1]

    def copy_of(self, value: torch.Tensor, parameter: torch.Tensor) -> HostCopy:
        """Begins to copy `value` from the device of `parameter` to such memory, without padding."""
        engine = self.runtime.engine(parameter)
        return HostCopy(engine, *self._take(value.numel() * value.itemsize, parameter, "auto"), value)

    def _take(self, nbytes: int, parameter: torch.Tensor, tier: str) -> tuple[Mapped, torch.Tensor]:
        runtime = self.runtime
        host = host_parameter_of(parameter, runtime.by_storage)
        # A parameter that streams is a CPU tensor now; its tiers are those of the device that it streams to.
        like = parameter if host is None or host.like is None else host.like
        key = id(runtime), like.device
        if key not in self._memories:
            self._memories[key] = runtime.mover(like).new_memory()
        found = self._memories[key].take(nbytes, tier)
        if found is None:
            raise self.full(nbytes)
        return found

    def full(self, nbytes: int) -> RuntimeUnavailable:
        """Returns the error for: no tier has room for `nbytes`."""
        return RuntimeUnavailable(
            f"{self.title}: no tier has room for {nbytes} bytes; raise the caps of the runtime (disk_bytes, "
            "host_bytes), or leave this transform out"
        )

    def moved(self, value: torch.Tensor, parameter: torch.Tensor, tier: str) -> torch.Tensor:
        """Returns a copy of `value` on `tier` of the device of `parameter`, or on the next tier below that has room."""
        return laid_out(self.room(value.nbytes, parameter, tier), value).copy_(value.detach())


def is_large(value: Any) -> bool:
    """Whether `value` is a state to keep on a tier: a strided tensor of at least a page."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.nbytes >= _LEAST_BYTES


def laid_out(contents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the bytes as a tensor with the type, shape and dimension order of `like`."""
    strides = torch.empty_like(like, device="meta").stride()
    return contents.view(like.dtype).as_strided(like.shape, strides).detach()


class _Coming(NamedTuple):
    """The host copies, in flight, of an accelerator's parameter and of its gradient."""

    weights: HostCopy
    gradient: HostCopy


class StepOnHost(StepPart):
    """Steps every parameter on the CPU; for parameters of an accelerator with PyTorch's fused CPU kernel.

    Copies to and from the accelerator overlap with the steps of other parameters.

    Args:
        below: allocates the host memory for the copies.
    """

    def __init__(self, how: Any, optimizer: PartedOptimizer, inner: StepPart, below: Below) -> None:
        super().__init__(how, optimizer, inner)
        self._below = below
        self._coming: dict[int, _Coming] = {}  # copies to the host in flight, by the id of the parameter
        self._going: list[tuple[torch.Tensor, HostCopy]] = []  # copies back to the device in flight

    def ask(self, parameters: list[torch.Tensor]) -> bool:
        for parameter in parameters:
            if id(parameter) not in self._coming and device_type(parameter) != "cpu":
                assert parameter.grad is not None, "it steps"
                copies = [self._below.copy_of(each, parameter) for each in (parameter, parameter.grad)]
                self._coming[id(parameter)] = _Coming(*copies)
        return any(id(parameter) in self._coming for parameter in parameters)

    def settle(self) -> None:
        self._coming.clear()
        self._arrive()

    def advance(self, group: Group) -> None:
        on_host = [each for each in group["params"] if device_type(each) == "cpu"]
        on_device = [each for each in group["params"] if device_type(each) != "cpu"]
        for now in in_turn(group, filter(None, (on_host, on_device))):
            if now["params"] is on_host:
                self.inner.advance(now)
            else:
                self._advance_over_the_link(now)

    def _advance_over_the_link(self, group: Group) -> None:
        optimizer, parameters = self.optimizer, group["params"]
        state: Any = optimizer.state
        options = {"capturable": False} if "capturable" in group else {}
        if issubclass(optimizer._own_class, _FUSED_ON_CPU):
            options |= {"foreach": False, "fused": True}
        self._arrive()  # first: stepped weights that have been copied back still occupy device memory for staging
        self.ask(parameters)
        coming = [self._coming[id(parameter)] for parameter in parameters]
        twins, before = [], []
        for parameter, (weights, gradient) in zip(parameters, coming, strict=True):
            twin = weights.arrived()
            twin.grad_dtype = gradient.arrived().dtype
            twin.grad = gradient.arrived()
            before.append(state.get(parameter, {}))
            optimizer._twins[id(twin)] = parameter
            twins.append(twin)
        now = {**group, **options}
        try:
            after = self.advance_twins(now, twins, before)
        finally:
            optimizer._twins.clear()
        # In a backward other operators may still read the parameters while a side stream would overwrite them.
        at_once = torch._C._current_graph_task_id() == -1
        for parameter, twin, states in zip(parameters, twins, after, strict=True):
            twin.grad = None
            weights = self._coming.pop(id(parameter)).weights
            weights.ask_back(parameter, at_once=at_once, group=id(twins[0]))
            self._going.append((parameter, weights))
            if states:
                state[parameter] = states
        group.update({key: value for key, value in now.items() if key not in options})

    def _arrive(self) -> None:
        """Writes the stepped values to their parameters."""
        while self._going:
            parameter, weights = self._going[0]
            with torch.no_grad():
                weights.bring_back(parameter)
            self._going.pop(0)
