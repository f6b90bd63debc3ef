"""A lock around recomputes, because a recompute temporarily restores old state that all threads see.

A recompute needs the flags, attributes, buffers, hooks and random states of the forward. Where the present ones differ,
it writes the old ones into the modules and restores the present ones at its end. Forwards and recomputes of regions in
other threads wait meanwhile. Code outside of regions does not wait, and sees the old state.
"""

from __future__ import annotations

import threading
from typing import Any

from memscale.core import CorrectnessError

_get_ident = threading.get_ident
PATIENCE_SECONDS = 60.0  # of waiting for another thread, before an error


class _RecomputeLock:
    """A reentrant lock, to be held by ``with recompute_lock.lock`` after `wait`: an interrupt then leaves it free.

    Attributes:
        lock: the lock.
        thread: the identifier of the thread that recomputes, by which others see that they must wait; 0 for none.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = 0

    def wait(self) -> None:
        """Waits until no other thread recomputes.

        Raises:
            CorrectnessError: another thread held the lock for more than `PATIENCE_SECONDS`.
        """
        if self.thread in (0, _get_ident()):
            return
        if not self.lock.acquire(timeout=PATIENCE_SECONDS):
            raise CorrectnessError(
                f"a recompute waited {PATIENCE_SECONDS:.0f} s for a recompute in another thread. Only one can run at "
                "a time, since it restores old state of modules; run the two backwards one after the other"
            )
        self.lock.release()


#: The lock that excludes the recomputes of other threads.
recompute_lock = _RecomputeLock()


def wait_for_recomputes() -> None:
    """Waits until no other thread recomputes. Called in a forward before the state of a region is read."""
    recompute_lock.wait()


_is_owned: Any = recompute_lock.lock._is_owned  # type: ignore[attr-defined]


def in_recompute() -> bool:
    """Whether this thread is recomputing, so that modules may hold the old state of a forward."""
    return bool(_is_owned())
