"""`Link`: orders the copies of one direction of the link to the device, by deadline."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from memscale.core import MemscaleError
from memscale.runtime.backends.protocol import Event

# One copy running and one queued keep a stream busy. Every further queued copy could not be overtaken any more by a
# copy that turns out to be needed first.
_WINDOW = 2


class Copy:
    """A requested copy; it has an event once it was given to its stream.

    Attributes:
        group: copies of one group are needed together.
        owners: the compute streams that may reuse the copy's device memory after it is freed.
        behind: the compute streams that wait for the copy already.
    """

    __slots__ = ("_link", "behind", "event", "group", "owners", "start", "started")

    def __init__(
        self,
        link: Link,
        start: Callable[[], Event],
        started: Callable[[Event], None],
        owners: Sequence[int],
        group: Hashable | None,
    ) -> None:
        self._link = link
        self.group = group
        self.owners = owners
        self.behind: set[int] = set()
        self.start: Callable[[], Event] | None = start  # None once the copy has started or was given up
        self.started = started
        self.event: Event | None = None

    def need(self) -> Event:
        """Returns the copy's event; starts the copy now, ahead of all waiting ones, if it has not started."""
        if self.event is None:
            self._link.start(self)
        assert self.event is not None
        return self.event

    def is_under_way(self) -> bool:
        """Whether the copy has started and is not done."""
        return self.event is not None and not self.event.done()

    def give_up(self) -> bool:
        """Cancels the copy; returns False if it has started, so that the caller has to wait for it."""
        self.start = None
        return self.event is None


class Link:
    """Schedules the copies of one direction: earliest deadline first.

    Activations, parameters and gradients are requested long before they are needed. At most `window` copies are given
    to the stream at a time; the others are `waiting`, where an urgent copy can overtake them.

    >>> class Done:
    ...     def done(self): return False
    >>> link, started = Link(window=1), []
    >>> def copy(name):
    ...     return lambda: (started.append(name), Done())[1]
    >>> first, late, soon = (link.ask(copy(name), deadline=when) for name, when in [("a", 0), ("late", 9), ("soon", 5)])
    >>> link.pump()
    >>> started
    ['a']
    >>> _ = late.need()
    >>> started
    ['a', 'late']
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self.waiting: list[tuple[float, int, Copy]] = []
        self._under_way: deque[Event] = deque()
        self._count = 0
        self._last: Hashable | None = None  # the group of the copy that was started last

    def ask(
        self,
        start: Callable[[], Event],
        *,
        deadline: float,
        started: Callable[[Event], None] = lambda event: None,
        owners: Sequence[int] = (),
        group: Hashable | None = None,
    ) -> Copy:
        """Returns a copy that `start` gives to the stream at the next `pump` or later, at the latest when it is needed.

        Args:
            start: queues the copy and returns its event.
            deadline: when the copy is expected to be needed, in seconds of the backend's clock.
            started: called with the event when the copy has started.
            owners: see `Copy`.
            group: copies of one group are needed together. Once one of them was started, `pump` starts all of them,
                because a region that runs may not call the engine again before it needs the last one.
        """
        copy = Copy(self, start, started, owners, group)
        self._count += 1  # makes the heap's tuples unique, because copies cannot be compared
        heapq.heappush(self.waiting, (deadline, self._count, copy))
        return copy

    def pump(self) -> None:
        """Starts the copies that fit in the window. Called with every call of the engine."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        while self.waiting:
            copy = self.waiting[0][2]
            if len(self._under_way) >= self._window and (copy.group is None or copy.group != self._last):
                return
            heapq.heappop(self.waiting)
            if copy.start is not None:
                # The caller may have no part in this copy. If starting it fails, `need` tries again and raises there.
                with contextlib.suppress(MemscaleError, MemoryError, OSError, RuntimeError):
                    self.start(copy)

    def start(self, copy: Copy) -> None:
        """Starts `copy` ahead of all waiting ones. If that raises, it may be started again."""
        assert copy.start is not None, "a copy that was given up is not needed"
        copy.event = event = copy.start()
        copy.start = None  # right away: a second start would lose the first event, and nobody would wait for it
        self._last = copy.group
        self._under_way.append(event)
        copy.started(event)
