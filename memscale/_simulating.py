"""Whether a step is being simulated: its tensors then have sizes and no values, and resources are only counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SimulatedStep:
    """One simulation.

    Attributes:
        device_type: of the device that is simulated, whatever the tensors say.
        engines: what moved bytes to other tiers meanwhile, as it counted them.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.engines: list[Any] = []


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
