"""What finalizers hand to an engine to be closed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol


class Ended(Protocol):
    """What is over and holds bytes, perhaps while they are copied."""

    def is_moving(self) -> bool:
        """Whether a copy of the bytes is under way. Never blocks."""


class Finalized:
    """Things that are over, each with what has to be done about it, perhaps twice, while `lock` is held.

    Finalizers run at any moment: in any thread, where the garbage collector happens to start, and inside whatever that
    thread does there. One that waited, for the lock or for a copy, could wait for its own thread. So it closes what it
    can at once, and leaves the rest to the engine's next call.

    >>> class Bytes:
    ...     moving = True
    ...     def is_moving(self): return self.moving
    >>> finalized, closed, some, more = Finalized(threading.Lock()), [], Bytes(), Bytes()
    >>> more.moving = False
    >>> finalized.add(some, closed.append)
    >>> finalized.add(more, closed.append)
    >>> closed == [more]
    True
    >>> finalized.collect()
    >>> closed == [more, some]
    True
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._process = os.getpid()
        self._items: deque[tuple[Ended, Callable[[Any], None]]] = deque()

    def add(self, item: Ended, close: Callable[[Any], None]) -> None:
        """To be called by a finalizer: `close(item)` now if that is possible at once, or later."""
        self._items.append((item, close))
        self.collect(wait=False)

    def collect(self, *, wait: bool = True) -> None:
        """Close all that is left; where `wait` is false, only what is not moving."""
        if os.getpid() != self._process:  # a fork, where nothing that is under way ends
            return
        while self._items:
            # Whoever holds the lock comes here after releasing it: nobody needs to wait, least of all a finalizer
            # that interrupted the holder.
            if not self._lock.acquire(blocking=False):
                return
            try:
                some_are_left = self._close_items(wait)
            finally:
                self._lock.release()
            if some_are_left:
                return

    def _close_items(self, wait: bool) -> bool:
        some_are_left = False
        for _ in range(len(self._items)):
            item, close = self._items[0]
            if wait or not item.is_moving():
                try:
                    close(item)
                except Exception:
                    self._items.popleft()
                    raise
                self._items.popleft()  # only now: who is interrupted while waiting has not closed it
            else:
                self._items.rotate(-1)
                some_are_left = True
        return some_are_left
