"""One direction of the link to the device: who may copy next."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from memscale.core import MemscaleError
from memscale.runtime.backends.protocol import Event

# A stream that has the next copy queued behind the present one never runs dry. More of them only stand in the way of
# what turns out to be needed first: a copy that a stream was given cannot be overtaken any more.
_WINDOW = 2


class Copy:
    """A copy that was asked for; it has an event once its stream was given it.

    Attributes:
        group: what is needed with it at once.
        owners: the compute streams that reuse its memory on the device, once that is free.
        behind: the compute streams that come after it.
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
        self.start: Callable[[], Event] | None = start  # `None` once it has started, or was given up
        self.started = started
        self.event: Event | None = None

    def need(self) -> Event:
        """Its event; it starts now, before all that waits."""
        if self.event is None:
            self._link.start(self)
        assert self.event is not None
        return self.event

    def is_under_way(self) -> bool:
        """Whether it has started and is not done."""
        return self.event is not None and not self.event.done()

    def give_up(self) -> bool:
        """Forget it, since nobody needs it any more; `False` where it has started and must be waited for."""
        self.start = None
        return self.event is None


class Link:
    """Shares one direction between all that is copied in it: the earliest deadline goes first.

    Activations, parameters and gradients are asked for long before they are needed. Few copies at a time go to the
    stream, and the others wait here, where one that is needed at once overtakes them.

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
        self._waiting: list[tuple[float, int, Copy]] = []
        self._under_way: deque[Event] = deque()
        self._count = 0
        self._last: Hashable | None = None  # the group of the copy that started last

    def ask(
        self,
        start: Callable[[], Event],
        *,
        deadline: float,
        started: Callable[[Event], None] = lambda event: None,
        owners: Sequence[int] = (),
        group: Hashable | None = None,
    ) -> Copy:
        """A copy that `start` gives to the stream at the next `pump`, or later, and at the latest when it is needed.

        Args:
            start: queues the copy and returns its event.
            deadline: when it is expected to be needed, in seconds of the backend's clock.
            started: called with the event then.
            owners: see `Copy`.
            group: what is needed with it at once. A group that has begun is given to the stream as a whole, since
                nobody may call before all of it is needed: a region may run without asking for anything.
        """
        copy = Copy(self, start, started, owners, group)
        self._count += 1  # first: two of one number could not be compared
        heapq.heappush(self._waiting, (deadline, self._count, copy))
        return copy

    def pump(self) -> None:
        """Start what may start. Called whenever the engine is."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        while self._waiting:
            copy = self._waiting[0][2]
            if len(self._under_way) >= self._window and (copy.group is None or copy.group != self._last):
                return
            heapq.heappop(self._waiting)
            if copy.start is not None:
                # Whoever is here may have no part in it. It is tried again when it is needed, by whom it concerns.
                with contextlib.suppress(MemscaleError, MemoryError, OSError, RuntimeError):
                    self.start(copy)

    def start(self, copy: Copy) -> None:
        """Start `copy`, whatever waits. Where that fails, it may be started again."""
        assert copy.start is not None, "a copy that was given up is not needed"
        copy.event = event = copy.start()
        copy.start = None  # at once: with a copy of one copy under way, nobody would wait for the first
        self._last = copy.group
        self._under_way.append(event)
        copy.started(event)
