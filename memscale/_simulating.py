"""Whether a step is being simulated: its tensors then have sizes and no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def simulating() -> bool:
    """Whether code runs inside a simulation, so that comparing or copying values means nothing.

    >>> simulating()
    False
    """
    return _depth > 0


@contextmanager
def simulation() -> Iterator[None]:
    """Say so for the body."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
