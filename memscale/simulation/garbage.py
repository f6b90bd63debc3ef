"""Python's garbage collections while a step is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 100_000  # objects: about as many as a large step makes


@contextmanager
def few_collections() -> Iterator[None]:
    """Let collections be rare in the body.

    A simulation makes a hundred thousand objects that stay, at each quarter more of which Python goes through all
    there are: half a million of PyTorch and the model, which took a tenth of a simulation.

    >>> with few_collections():
    ...     gc.get_threshold()[0]
    100000
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG:  # off, or rare already
        yield
        return
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
