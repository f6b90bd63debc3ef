"""The host's seconds between the operators of a step: the model's Python, autograd, the optimizer, the transforms.

NOTE: in a simulation this code really runs, so it is timed: the seconds between the end of one operator and the
beginning of the next, minus the simulator's own cost. Code is slower the first times that it runs, and other load on
the machine only adds time, so the minimum over several steps counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from memscale.core import is_own_thread


class Own(NamedTuple):
    """The simulator's own cost in seconds, beyond PyTorch's cost of the call.

    Attributes:
        at_operator: the seconds around each operator.
        at_view: the seconds around each view.
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
        """Stops the watch: an operator begins, or code that only a simulation runs."""
        if self._since is not None:
            self._passed += self._clock() - self._since
            self._since = None

    def views(self) -> None:
        """Counts a view, which the simulation runs for real."""
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
        """Lets the body not count."""
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
