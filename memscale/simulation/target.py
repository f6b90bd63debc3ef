"""The device that steps are simulated for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.core import ConfigError
from memscale.hardware import Hardware
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.parallel.sharded import mesh_of


@dataclass(frozen=True, eq=False)
class Target:
    """A device, and what simulations for it have found of its kernels, which later ones know.

    >>> Target.of(Hardware("box", "cpu", 2**34)).hardware.name
    'box'
    """

    hardware: Hardware
    kernels: Kernels

    @classmethod
    def of(cls, hardware: Hardware, *, probe: bool = False) -> Target:
        """The target that is this hardware; with `probe` its kernels run for real."""
        return cls(hardware, Kernels(hardware, probe=probe))


def hardware_for(model: Any, hardware: Hardware | str | None) -> Hardware:
    """The hardware that a caller means for `model`: as `as_hardware`, where None is the model's device."""
    return as_hardware(hardware, _device_type(model))


def as_hardware(hardware: Any, device_type: str) -> Hardware:
    """The hardware that a caller means: a `Hardware`, the name of a card, or None for what is here.

    Raises:
        ConfigError: it is none of these, or no card is called that.
    """
    if hardware is None:
        return Hardware.detect(None if device_type == "meta" else device_type)
    if isinstance(hardware, str):
        return Hardware.detect("cpu") if hardware == "cpu" else Hardware.named(hardware)
    if isinstance(hardware, Hardware):
        return hardware
    raise ConfigError(
        f"hardware={hardware!r} must be a memscale.Hardware, the name of a card such as 'h100', 'cpu', or None for "
        "the device at hand"
    )


def _device_type(model: Any) -> str:
    if isinstance(model, nn.Module):
        if any(mesh.device_type == "cuda" for mesh in map(mesh_of, model.modules()) if mesh is not None):
            return "cuda"  # also where its shards are on the CPU
        for parameter in model.parameters():
            return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"
