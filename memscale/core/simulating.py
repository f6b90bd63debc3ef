"""Whether a step is being simulated: its tensors then have sizes and no values, and resources are only counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SimulatedStep:
    """One simulation.

    Attributes:
        device_type: of the device that is simulated, whatever the tensors say.
        engines: what moved bytes to other tiers meanwhile, as it counted them.
        homes: what lives on another tier in the simulation, by storage.
        away: makes a uint8 CPU tensor of so many bytes that takes up no memory of the simulated device.
        references: how many tensors refer to a storage for the simulation's own sake.
    """

    def __init__(
        self,
        device_type: str,
        away: Callable[[int], torch.Tensor],
        references: Callable[[torch.UntypedStorage], int],
    ) -> None:
        self.device_type = device_type
        self.away = away
        self.references = references
        self.engines: list[Any] = []
        self.homes: dict[int, Any] = {}


_running: list[SimulatedStep] = []


def simulating() -> SimulatedStep | None:
    """The simulation that code runs in, inside which comparing or copying values means nothing; None outside of one.

    >>> simulating() is None
    True
    """
    return _running[-1] if _running else None


@contextmanager
def simulation(step: SimulatedStep) -> Iterator[None]:
    """Say so for the body."""
    _running.append(step)
    try:
        yield
    finally:
        _running.pop()
