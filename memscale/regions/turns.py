"""Recomputes of several threads take turns, for they put state back that all threads see.

A recompute needs the flags, attributes, buffers, hooks and random states that the forward had. Where these are others
by now, it writes them into the modules, and puts the present back afterwards. Meanwhile another thread that uses the
same modules outside of a region sees them as they were; forwards and recomputes of regions wait.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from memscale.core import CorrectnessError

_get_ident = threading.get_ident
_PATIENCE_SECONDS = 60.0


class _Turn(AbstractContextManager[None]):
    """Held by one thread; by that one as often as it likes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self.thread = 0  # whose turn it is

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            raise CorrectnessError(
                "the recompute of a region waited a minute for the recompute of another one in another thread, which "
                "has put its own state back for that time; run the two backwards one after the other"
            )
        self.thread = _get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.thread = 0
        self._lock.release()


_turn = _Turn()


def my_turn() -> AbstractContextManager[None]:
    """Let no other recompute run while the body does.

    Raises:
        CorrectnessError: another thread's recompute does not come to its end.
    """
    return _turn


def wait_for_recomputes() -> None:
    """Before a region is read in a forward: let the recompute of another thread put back what it wrote."""
    if _turn.thread not in (0, _get_ident()):
        with _turn:
            pass


def in_recompute() -> bool:
    """Whether a recompute runs in this thread: what modules hold then may be of the past."""
    return _turn.thread == _get_ident()
