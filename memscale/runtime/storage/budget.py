"""`HostBudget`: the limit on host RAM for moved bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from memscale.core import RuntimeUnavailable, available_host_bytes

KEPT_FREE_BYTES = 512 * 1024**2


class HostBudget:
    """Counts the host bytes of offloading against a cap and against the RAM that is available.

    Thread-safe. ``release`` takes no lock, so a finalizer may call it at any moment. Reserved memory has to be touched
    before the next reservation, as `page_aligned_memory` does, because the system counts memory from then on only.

    Args:
        cap_bytes: the most bytes reserved at once; None is limited by the available RAM alone.
        kept_free_bytes: RAM that is left free for everything else.
        available_bytes: returns the RAM that the process can still get, or None if unknown.

    Raises:
        RuntimeUnavailable: there is no cap, and the available RAM is unknown.

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
        # The garbage collector may run a finalizer inside `reserve`, in the same thread, so `release` takes no lock.
        self._released: deque[int] = deque()

    def reserve(self, nbytes: int) -> bool:
        """Counts ``nbytes`` as reserved and returns True, or returns False if they do not fit."""
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
        """Returns ``nbytes`` that `reserve` granted."""
        self._released.append(nbytes)

    @property
    def reserved_bytes(self) -> int:
        """The bytes reserved now.

        Raises:
            AssertionError: more was released than reserved.
        """
        with self._lock:
            self._count_released()
            return self._reserved_bytes

    def _count_released(self) -> None:
        while self._released:
            self._reserved_bytes -= self._released.popleft()
        assert self._reserved_bytes >= 0, f"{-self._reserved_bytes} bytes more were released than were reserved"
