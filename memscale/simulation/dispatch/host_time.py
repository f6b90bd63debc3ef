"""What the host does between the operators of a step: the model's own Python, autograd, the optimizer, the transforms.

In a simulation all of it really runs. So it is timed there, where operators were going to be: what passes between the
end of one and the beginning of the next, less what the simulation itself takes at each. A step's code is slower the
first times that it runs, and what else the machine does only ever makes it slower: the least of several steps counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from memscale.core import is_own_thread


class Own(NamedTuple):
    """What a simulation takes by itself, in seconds.

    Attributes:
        at_operator: around each operator, above what PyTorch takes to call it.
        at_view: around each operator that computes nothing, likewise.
    """

    at_operator: float = 0.0
    at_view: float = 0.0


class HostTime:
    """A stopwatch for the host, which stands while the simulation is at work.

    Args:
        own: what the simulation takes and the stopwatch sees.
        clock: seconds since some moment, of this thread alone.

    >>> ticks = iter([0.0, 5.0, 7.0, 8.0])
    >>> host = HostTime(Own(at_operator=1.0), lambda: next(ticks))
    >>> host.goes_on()  # at 0
    >>> host.stands()  # at 5
    >>> host.taken("mm"), host.taken("add")
    (4.0, 0.0)
    >>> host.goes_on()  # at 7
    >>> host.stands()
    >>> host.taken("mm")
    0.0
    """

    def __init__(self, own: Own, clock: Callable[[], float] = time.thread_time) -> None:
        self.own = own
        self._clock = clock
        self._passed = 0.0
        self._views = 0
        self._since: float | None = None
        self._collects = False
        self._steps = 0
        self._at = 0  # the operator of this step that comes next
        self._least: list[tuple[str, float]] = []  # of each so far, in steps after the first

    def goes_on(self) -> None:
        """The step's own code runs from here on."""
        self._since = self._clock()

    def stands(self) -> None:
        """It has come to an operator, or to something that only a simulation does."""
        if self._since is not None:
            self._passed += self._clock() - self._since
            self._since = None

    def views(self) -> None:
        """It has made a view, which took its time for real."""
        self._views += 1

    def taken(self, op: str) -> float:
        """The seconds before this call of `op`, since the operator before it: the least of all steps so far."""
        own = self.own.at_operator + self._views * self.own.at_view if self._passed else 0.0
        taken, self._passed, self._views = max(0.0, self._passed - own), 0.0, 0
        if self._steps < 2:  # the first step makes the states of the optimizer
            return taken
        at, self._at = self._at, self._at + 1
        if at == len(self._least):
            self._least.append((op, taken))
        elif self._least[at][0] == op:
            taken = min(taken, self._least[at][1])
            self._least[at] = op, taken
        return taken

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Let the body not count."""
        self.stands()
        try:
            yield
        finally:
            self.goes_on()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The body is the step. Python's garbage collections do not count: a simulation makes far more objects."""

        def stand(phase: str, _: object) -> None:
            if not is_own_thread():
                return
            if phase == "start" and self._since is not None:
                self.stands()
                self._collects = True
            elif phase == "stop" and self._collects:
                self._collects = False
                self.goes_on()

        gc.callbacks.append(stand)
        self._passed, self._views, self._at = 0.0, 0, 0
        self._steps += 1
        self.goes_on()
        try:
            yield
        finally:
            self.stands()
            gc.callbacks.remove(stand)
