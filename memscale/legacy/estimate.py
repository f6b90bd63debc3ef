"""What a training step keeps on the device, counted without running it: the legacy face's smart skip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.core.batches import call, check_batch
from memscale.core.pytrees import tensors
from memscale.hardware.device import Hardware
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.sandbox import Simulation

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
    """Count the bytes that ``model(batch)`` keeps for backward; nothing is computed.

    A storage counts once however many views of it are saved; parameters, buffers and the batch do not count.
    The model and the random state are left as they were.

    Raises:
        ConfigError: ``batch`` is not what a model can be called with.
        Exception: whatever the model raises, and `NeedsValues` where its control flow reads values.
    """
    check_batch(batch)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Held on to, so that no later storage gets the number of one that has died.
        if not simulation.mode.storages.is_resident(tensor):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
        return tensor

    kernels = Kernels(Hardware.detect("cpu"), probe=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with Simulation(model, model, None, batch, kernels=kernels) as simulation, torch.enable_grad(), hooks:
        call(model, batch)
    return sum(storage.nbytes() for storage in kept.values())
