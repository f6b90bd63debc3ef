"""Python's garbage collections while a step is simulated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from memscale.core import is_alone, one_at_a_time

_YOUNG = 100_000  # objects: about as many as a large step makes
EVERY = 500  # operators between collections, so that a cycle of the step, and its tensors, die soon, as in reality


class StepCollections:
    """Runs garbage collections at fixed points of a simulated step.

    Python collects by the number of all objects, including those of the process before: a step with tensors in cycles
    would free them at other moments, and hold other bytes, in each run. If Python's collector is off, these collections
    are off too. All threads share the collector: with another thread, Python's own collections continue, and deaths
    that they find count at the next collection here.

    Args:
        wait: called with True while another collection runs and finds deaths, and with False afterwards.
        settle: called when the deaths found so far count.
    """

    def __init__(self, wait: Callable[[bool], object], settle: Callable[[], object]) -> None:
        self._on = gc.isenabled()
        self._wait = wait
        self._settle = settle
        self._collects = False
        if self._on:
            if is_alone():
                gc.disable()  # `process_kept` enables the collector again
            else:
                gc.callbacks.append(self._noticed)
            gc.collect(1)  # excludes young objects from before the step

    def collect(self) -> None:
        """Collects, after each `EVERY` operators."""
        if self._on:
            self._collects = True
            gc.collect(1)
            self._collects = False
            self._settle()

    def end(self) -> None:
        """Ends the collections."""
        if self._noticed in gc.callbacks:
            gc.callbacks.remove(self._noticed)

    def _noticed(self, phase: str, _: object) -> None:
        if not self._collects:
            self._wait(phase == "start")


class _Known:
    before: frozenset[int] | None = None  # the ids of unfrozen objects from before
    new: frozenset[int] = frozenset()  # the ids of newer objects


@contextmanager
def _objects_known() -> Iterator[None]:
    if _Known.before is not None:
        yield
        return
    _Known.before = frozenset() if _freezes() else _all_ids()
    try:
        yield
    finally:
        _Known.before = None


def _all_ids() -> frozenset[int]:
    """Returns the ids of the objects that Python's collector tracks.

    A single C call, so that no other thread runs meanwhile: a generator could not extend a tuple that another thread
    holds.
    """
    return frozenset(map(id, chain.from_iterable(islice(iter(gc.get_objects, None), 1))))


def _freezes() -> bool:
    return is_alone() and gc.isenabled() and 0 < gc.get_threshold()[0] < _YOUNG and gc.get_freeze_count() == 0


@contextmanager
def all_objects_seen() -> Iterator[None]:
    """Makes `gc.get_referrers` see frozen objects in the body, and `is_from_before` know the older objects."""
    before = _Known.before
    _Known.new = frozenset() if before is None else _all_ids() - before
    frozen = gc.get_freeze_count() > 0 and is_alone()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        _Known.new = frozenset()
        if frozen:
            gc.freeze()


def is_from_before(thing: object) -> bool:
    """Whether `thing` is older than `few_collections`, for objects that the collector tracks."""
    return id(thing) not in _Known.new


@contextmanager
def few_collections() -> Iterator[None]:
    """Makes collections rare in the body and freezes older objects; one thread at a time.

    A simulation makes a hundred thousand objects, half of which stay or are in cycles. At each quarter more, Python
    would go through all objects, half a million of PyTorch's and the model's: a tenth of a simulation's time.
    Where another thread runs, the collector stays unchanged.

    >>> before = gc.get_threshold()
    >>> with few_collections():
    ...     gc.get_threshold()[0] == (100000 if is_alone() else before[0])
    True
    """
    with one_at_a_time(), _objects_known():
        before = gc.get_threshold()
        if not (is_alone() and gc.isenabled() and 0 < before[0] < _YOUNG):  # off, or rare already
            yield
            return
        gc.set_threshold(_YOUNG, *before[1:])
        is_ours = gc.get_freeze_count() == 0  # otherwise the caller's objects stay frozen
        if is_ours:
            gc.freeze()
        try:
            yield
        finally:
            if is_ours:
                gc.collect()
                gc.unfreeze()
            gc.set_threshold(*before)
