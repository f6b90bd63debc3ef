"""A lock around recomputes, because a recompute temporarily restores old state that all threads see.

A recompute needs the flags, attributes, buffers, hooks and random states of the forward. Where the present ones differ,
it writes the old ones into the modules and restores the present ones at its end. Forwards and recomputes of regions in
other threads wait meanwhile. Code outside of regions does not wait, and sees the old state.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from memscale.core import CorrectnessError

_get_ident = threading.get_ident
PATIENCE_SECONDS = 60.0  # of waiting for another thread, before an error


class _RecomputeLock(AbstractContextManager[None]):
    """A reentrant lock with a timeout, which knows the thread that holds it.

    Raises:
        CorrectnessError: on entering, another thread's recompute held the lock for more than `PATIENCE_SECONDS`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self.thread = 0  # the identifier of the thread that holds the lock; 0 for none

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            raise CorrectnessError(
                f"a recompute waited {PATIENCE_SECONDS:.0f} s for a recompute in another thread. Only one can run at "
                "a time, since it restores old state of modules; run the two backwards one after the other"
            )
        self.thread = _get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.thread = 0
        self._lock.release()


#: The context that excludes the recomputes of other threads while its body runs.
recompute_lock = _RecomputeLock()


def wait_for_recomputes() -> None:
    """Waits until no other thread recomputes. Called in a forward before the state of a region is read."""
    if recompute_lock.thread not in (0, _get_ident()):
        with recompute_lock:
            pass


def in_recompute() -> bool:
    """Whether this thread is recomputing, so that modules may hold the old state of a forward."""
    return recompute_lock.thread == _get_ident()
