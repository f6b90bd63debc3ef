"""Whether a step is being simulated: its tensors then have sizes and no values.

What moves bytes is told by the runtime that the simulation passes in. This is for what has no runtime: a region that
compares values to learn what it changes, over ordinary tensors of memory that nothing may touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_running: list[None] = []


def simulating() -> bool:
    """Whether code runs in a simulation, where comparing values means nothing.

    >>> simulating()
    False
    """
    return bool(_running)


@contextmanager
def simulation() -> Iterator[None]:
    """Say so for the body."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
