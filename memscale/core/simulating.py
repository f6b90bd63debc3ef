"""Whether a step is being simulated, and on which device its tensors are to be thought.

A simulated step computes nothing: its tensors are on the CPU, have sizes and no values. What moves bytes is told by the
runtime that the simulation passes in. This is for what has no runtime: code that compares values to learn what a region
changes, over ordinary tensors of memory that nothing may touch; and code that goes another way on another device, which
must go the way of the device that is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_running: list[tuple[str, Callable[[torch.Tensor], str], tuple[int, int] | None, Any]] = []


def simulating() -> bool:
    """Whether code runs in a simulation, where comparing values means nothing.

    >>> simulating()
    False
    """
    return bool(_running)


def simulated_device_type() -> str | None:
    """The type of the device that is simulated, None outside of simulations.

    >>> with simulation("cuda", lambda tensor: "cuda"):
    ...     simulated_device_type()
    'cuda'
    """
    return _running[-1][0] if _running else None


def device_type(tensor: torch.Tensor) -> str:
    """The type of the device that `tensor` is on, as everything in memscale that decides by it must ask.

    >>> device_type(torch.ones(1))
    'cpu'
    >>> with simulation("cuda", lambda tensor: "cuda"):
    ...     device_type(torch.ones(1))
    'cuda'
    """
    return _running[-1][1](tensor) if _running else tensor.device.type


def compute_capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """That of the CUDA device that `tensor` is on; None on any other.

    >>> with simulation("cuda", lambda tensor: "cuda", (7, 5)):
    ...     compute_capability(torch.ones(1))
    (7, 5)
    """
    if device_type(tensor) != "cuda":
        return None
    return _running[-1][2] if _running else torch.cuda.get_device_capability(tensor.device)


def simulated_choices() -> Any:
    """What the simulation that runs draws from for itself; None where it draws nothing."""
    return _running[-1][3] if _running else None


@contextmanager
def simulation(
    device_type: str,
    type_of: Callable[[torch.Tensor], str],
    capability: tuple[int, int] | None = None,
    choices: Any = None,
) -> Iterator[None]:
    """Simulate a device of this type in the body, where `type_of` says it of a tensor: some lie beside the device.

    `capability` is the compute capability of a CUDA device. From its `choices`, which have `get_state` and `set_state`,
    the simulation draws random numbers for itself.
    """
    _running.append((device_type, type_of, capability, choices))
    try:
        yield
    finally:
        _running.pop()
