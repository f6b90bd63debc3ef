"""Python's garbage collections while a step is simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 100_000  # objects: about as many as a large step makes
EVERY = 500  # operators, so that a cycle of the step's, and the tensors in it, goes soon, as in reality


class StepCollections:
    """Collections while a step is simulated, by how far it has come.

    Python's own come by how many objects there are, with those of whatever the process did before: a step whose tensors
    are in cycles would let go of them at other moments, and hold other bytes, each time. Where Python's are turned off,
    so are these.
    """

    def __init__(self) -> None:
        self._on = gc.isenabled()
        if self._on:
            gc.disable()  # whoever simulates turns it on again: see `process_kept`
            gc.collect(1)  # what is young now is none of the step's

    def collect(self) -> None:
        """The step has run `EVERY` more operators."""
        if self._on:
            gc.collect(1)


@contextmanager
def few_collections() -> Iterator[None]:
    """Let collections in the body be rare, and go through nothing that was there before.

    A simulation makes a hundred thousand objects, half of which stay or are in cycles, at each quarter more of which
    Python goes through all there are: half a million of PyTorch and the model, which took a tenth of a simulation.

    >>> with few_collections():
    ...     gc.get_threshold()[0]
    100000
    """
    before = gc.get_threshold()
    if not (gc.isenabled() and 0 < before[0] < _YOUNG):  # off, or rare already
        yield
        return
    gc.set_threshold(_YOUNG, *before[1:])
    is_ours = gc.get_freeze_count() == 0  # else the caller's stay frozen
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.collect()
            gc.unfreeze()
        gc.set_threshold(*before)
