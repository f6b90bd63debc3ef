"""`Finalized`: a queue from finalizers to the engine, for objects that cannot be closed at once."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol


class Ended(Protocol):
    """An object that nothing refers to any more, and whose bytes may still be in a copy."""

    def is_moving(self) -> bool:
        """Whether a copy of the bytes is in flight. Never blocks."""


class Finalized:
    """Objects to close, each with its close function, which is called with `lock` held, possibly twice.

    A finalizer runs at any moment: in any thread, wherever the garbage collector starts, even inside the engine's own
    code. Waiting there for the lock or for a copy could deadlock the thread with itself. So `add` closes what it can
    without waiting, and leaves the rest to the engine's next call of `collect`.

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
        self.items: deque[tuple[Ended, Callable[[Any], None]]] = deque()

    def add(self, item: Ended, close: Callable[[Any], None]) -> None:
        """Called by a finalizer: runs `close(item)` now if that needs no waiting, else later."""
        self.items.append((item, close))
        self.collect(wait=False)

    def collect(self, *, wait: bool = True) -> None:
        """Closes the queued objects; without `wait`, only those whose copies have ended."""
        if not self.items or os.getpid() != self._process:  # in a forked process copies in flight never end
            return
        while self.items:
            # The holder of the lock calls this function after it releases the lock, so giving up here loses nothing; a
            # finalizer that interrupted the holder must not wait for it.
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
        for _ in range(len(self.items)):
            item, close = self.items[0]
            if wait or not item.is_moving():
                try:
                    close(item)
                except Exception:  # a close that fails is not tried again; one that is interrupted is
                    self.items.popleft()
                    raise
                self.items.popleft()  # last: an interrupted wait leaves the object in the queue
            else:
                self.items.rotate(-1)
                some_are_left = True
        return some_are_left
