"""`Trims`: decides when a host that offloads calls `malloc_trim`, which returns cached memory to the system."""

from __future__ import annotations

import ctypes
import sys

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_TRIM_BYTES = 32 << 20


class Trims:
    """Counts bytes allocated and freed since the last `malloc_trim`: without it malloc keeps most freed memory.

    >>> trims = Trims()
    >>> [trims.due(2**24) for _ in range(4)] == [False, False, _MALLOC_TRIM is not None, False]
    True
    """

    def __init__(self) -> None:
        self._untrimmed_bytes = 0

    def due(self, nbytes: int) -> bool:
        """Counts `nbytes` and returns whether to trim now; always False on a malloc without `malloc_trim`."""
        self._untrimmed_bytes += nbytes
        if _MALLOC_TRIM is None or self._untrimmed_bytes <= _TRIM_BYTES:
            return False
        self._untrimmed_bytes = 0
        return True

    def after(self, nbytes: int) -> None:
        """Counts `nbytes`, and trims if it is time."""
        if self.due(nbytes):
            assert _MALLOC_TRIM is not None
            _MALLOC_TRIM(0)

    def now(self) -> None:
        """Trims now."""
        self.after(_TRIM_BYTES + 1)
