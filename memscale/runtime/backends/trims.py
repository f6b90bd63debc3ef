"""When a host that offloads has malloc give the system what it holds and does not use."""

from __future__ import annotations

import ctypes
import sys

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_TRIM_BYTES = 32 << 20


class Trims:
    """Counts the bytes that came and went: by itself malloc keeps most of them.

    >>> trims = Trims()
    >>> [trims.due(2**24) for _ in range(4)] == [False, False, _MALLOC_TRIM is not None, False]
    True
    """

    def __init__(self) -> None:
        self._untrimmed_bytes = 0

    def due(self, nbytes: int) -> bool:
        """Whether `nbytes` more make it time; never where this malloc gives nothing."""
        self._untrimmed_bytes += nbytes
        if _MALLOC_TRIM is None or self._untrimmed_bytes <= _TRIM_BYTES:
            return False
        self._untrimmed_bytes = 0
        return True

    def after(self, nbytes: int) -> None:
        """Have it done where `nbytes` more make it time."""
        if self.due(nbytes):
            assert _MALLOC_TRIM is not None
            _MALLOC_TRIM(0)

    def now(self) -> None:
        """Have it done."""
        self.after(_TRIM_BYTES + 1)
