"""The hard limit on host RAM that moved bytes may take."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from memscale.core import RuntimeUnavailable, available_host_bytes

KEPT_FREE_BYTES = 512 * 1024**2


class HostBudget:
    """Counts the host bytes of offloading against a cap and against the RAM that is really there.

    Threads may share it. ``release`` takes no lock and so may run in a finalizer at any moment. What is reserved must
    be touched before the next reservation, as `page_aligned_memory` does: the system counts memory only from then on.

    Args:
        cap_bytes: the most that may be reserved at once; None is as much as the system has.
        kept_free_bytes: RAM that stays free for everything else.
        available_bytes: says how much RAM the process can still have, None where that is unknown.

    Raises:
        RuntimeUnavailable: there is no cap, and the system does not say how much RAM is available.

    >>> budget = HostBudget(100, kept_free_bytes=0)
    >>> budget.reserve(60), budget.reserve(60)
    (True, False)
    >>> budget.release(60)
    >>> budget.reserve(60), budget.reserved_bytes
    (True, 60)
    """

    def __init__(
        self,
        cap_bytes: int | None,
        *,
        kept_free_bytes: int = KEPT_FREE_BYTES,
        available_bytes: Callable[[], int | None] = available_host_bytes,
    ) -> None:
        if cap_bytes is None and available_bytes() is None:
            raise RuntimeUnavailable(
                "this system does not say how much RAM is available, so offloading to it without a cap could take "
                "all; install psutil, or set max_cpu_offload_gb"
            )
        self.cap_bytes = cap_bytes
        self._kept_free_bytes = kept_free_bytes
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        # The collector may run a finalizer that releases inside `reserve`, in the same thread: no lock there.
        self._released: deque[int] = deque()

    def reserve(self, nbytes: int) -> bool:
        """Count ``nbytes`` as taken and return True, or change nothing where they do not fit."""
        with self._lock:
            self._count_released()
            if self.cap_bytes is not None and self._reserved_bytes + nbytes > self.cap_bytes:
                return False
            available_bytes = self._available_bytes()
            if available_bytes is not None and nbytes + self._kept_free_bytes > available_bytes:
                return False
            self._reserved_bytes += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give back ``nbytes`` that :meth:`reserve` granted."""
        self._released.append(nbytes)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that are reserved now.

        Raises:
            AssertionError: more was released than was ever reserved.
        """
        with self._lock:
            self._count_released()
            return self._reserved_bytes

    def _count_released(self) -> None:
        while self._released:
            self._reserved_bytes -= self._released.popleft()
        assert self._reserved_bytes >= 0, f"{-self._reserved_bytes} bytes more were released than were reserved"
