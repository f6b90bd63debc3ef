"""Python's garbage collections while a step is simulated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from memscale.core import is_alone, one_at_a_time

_YOUNG = 100_000  # objects: about as many as a large step makes
EVERY = 500  # operators, so that a cycle of the step's, and the tensors in it, goes soon, as in reality


class StepCollections:
    """Collections while a step is simulated, by how far it has come.

    Python's own come by how many objects there are, with those of whatever the process did before: a step whose tensors
    are in cycles would let go of them at other moments, and hold other bytes, each time. Where Python's are turned off,
    so are these. The collector is all threads': where another one runs Python's own go on, and what they find of the
    step's counts as gone when these come.

    Args:
        wait: called with whether deaths are found now by a collection that is none of these.
        settle: called when what was found so counts.
    """

    def __init__(self, wait: Callable[[bool], object], settle: Callable[[], object]) -> None:
        self._on = gc.isenabled()
        self._wait = wait
        self._settle = settle
        self._collects = False
        if self._on:
            if is_alone():
                gc.disable()  # whoever simulates turns it on again: see `process_kept`
            else:
                gc.callbacks.append(self._noticed)
            gc.collect(1)  # what is young now is none of the step's

    def collect(self) -> None:
        """The step has run `EVERY` more operators."""
        if self._on:
            self._collects = True
            gc.collect(1)
            self._collects = False
            self._settle()

    def end(self) -> None:
        """There is no step any more."""
        if self._noticed in gc.callbacks:
            gc.callbacks.remove(self._noticed)

    def _noticed(self, phase: str, _: object) -> None:
        if not self._collects:
            self._wait(phase == "start")


class _Known:
    before: frozenset[int] | None = None  # the objects that were there and not frozen, by id
    new: frozenset[int] = frozenset()  # those that were not


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
    """The objects that Python follows, by id.

    One call of C's, in which no other thread runs: Python can't finish a tuple of a generator's that someone else has.
    """
    return frozenset(map(id, chain.from_iterable(islice(iter(gc.get_objects, None), 1))))


def _freezes() -> bool:
    return is_alone() and gc.isenabled() and 0 < gc.get_threshold()[0] < _YOUNG and gc.get_freeze_count() == 0


@contextmanager
def all_objects_seen() -> Iterator[None]:
    """Have Python tell in the body who refers to an object, whoever froze that, and `is_from_before` who was there."""
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
    """Whether `thing` was there before `few_collections`, so far as Python follows it for garbage."""
    return id(thing) not in _Known.new


@contextmanager
def few_collections() -> Iterator[None]:
    """Lets collections in the body be rare, and go through nothing that was there before; one thread at a time.

    A simulation makes a hundred thousand objects, half of which stay or are in cycles, at each quarter more of which
    Python goes through all there are: half a million of PyTorch and the model, which took a tenth of a simulation.
    Where another thread runs, the collector stays as it is.

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
