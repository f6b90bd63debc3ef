"""What a training step keeps on the device, counted without running it: the legacy face's smart skip."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memscale._errors import ConfigError
from memscale._tree import flatten, tensors, unflatten

_MIB = 1024**2
# Adam's first and second moment, each with the parameter's shape and dtype.
_ADAM_MOMENTS = 2


@dataclass(frozen=True)
class StepEstimate:
    """The bytes that a step of the untransformed model keeps; ``activation_bytes`` is None if not measured.

    >>> print(StepEstimate(parameter_bytes=2**20, gradient_bytes=2**20, optimizer_bytes=2**21))
    4.0 MiB = parameters and buffers 1.0 + gradients 1.0 + optimizer 2.0 + activations not measured
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """The sum of all parts that are known."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + (self.activation_bytes or 0)

    def __str__(self) -> str:
        parts = {
            "parameters and buffers": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
        }
        shown = [f"{name} {nbytes / _MIB:.1f}" for name, nbytes in parts.items()]
        if self.activation_bytes is None:
            shown.append("activations not measured")
        else:
            shown.append(f"activations {self.activation_bytes / _MIB:.1f}")
        return f"{self.total_bytes / _MIB:.1f} MiB = {' + '.join(shown)}"


def static_estimate(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> StepEstimate:
    """Count parameters, gradients and optimizer states, without activations.

    An optimizer that has stepped is counted by the states it holds; otherwise two Adam moments are assumed.
    """
    state = [*model.parameters(), *model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient_bytes = sum(parameter.nbytes for parameter in trained)
    states = tensors([dict(state) for state in optimizer.state.values()]) if optimizer is not None else []
    return StepEstimate(
        parameter_bytes=sum(tensor.nbytes for tensor in state),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=sum(tensor.nbytes for tensor in states) or _ADAM_MOMENTS * gradient_bytes,
    )


def activation_bytes(model: nn.Module, batch: Any) -> int:
    """Count the bytes that ``model(batch)`` keeps for backward, on fake tensors: nothing is computed.

    A storage counts once however many views of it are saved; parameters, buffers and the batch do not count.
    The model and the random state are left as they were.

    Raises:
        Exception: whatever the model raises on fake tensors, as when its control flow reads values.
    """
    kept: dict[int, torch.UntypedStorage] = {}
    # A tokeniser's BatchEncoding is a mapping that no pytree library knows.
    leaves, spec = flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # Held on to, so that no later storage gets the number of one that has died.
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
            return tensor

        with borrowed(model, mode.from_tensor) as state, torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                call(model, unflatten(spec, fakes))
            for resident in (*state, *tensors(fakes)):
                kept.pop(resident.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def call(model: nn.Module, batch: Any) -> Any:
    """``model`` of ``batch``: a tensor is one argument, a tuple or list the arguments, a mapping keywords.

    Raises:
        ConfigError: ``batch`` is none of these.
    """
    if isinstance(batch, torch.Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    raise ConfigError(
        f"sample_input must be a tensor, a tuple of arguments or a mapping of keyword arguments, "
        f"got {type(batch).__name__}; pass what the model is called with"
    )


@contextmanager
def borrowed(model: nn.Module, substitute: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Run the model on other tensors, then put back its attributes, parameters, buffers and the random state.

    ``substitute`` gives the tensor that stands in for each parameter, buffer and tensor attribute; one that
    appears twice gets one stand-in. Yields the stand-ins. What a forward changes inside a list or another
    object of the user's is not undone.
    """
    stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = substitute(value)
        return stand_ins[id(value)]

    # Dicts are refilled, not replaced: their identity is part of what a caller may hold.
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (namespace, dict(namespace))
        for module in model.modules()
        for namespace in (module._parameters, module._buffers, module.__dict__)
    ]
    python_state = random.getstate()
    with torch.random.fork_rng(_cuda_devices(model.parameters())):
        try:
            for namespace, before in saved:
                for key, value in before.items():
                    namespace[key] = stand_in(value)
            yield list(stand_ins.values())
        finally:
            for namespace, before in saved:
                namespace.clear()
                namespace.update(before)
            random.setstate(python_state)


def _cuda_devices(parameters: Iterable[torch.Tensor]) -> list[int]:
    return sorted({parameter.get_device() for parameter in parameters if parameter.is_cuda})
