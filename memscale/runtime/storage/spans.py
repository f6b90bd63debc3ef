"""`FreeSpans`: the free ranges of an address space, used by the arena in memory and the slab on disk."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeSpans:
    """Free ranges of an address space: allocated best fit first, and merged with their neighbours when freed.

    Not thread-safe: its owner holds a lock. A search takes O(log n) comparisons for n *free* ranges.

    >>> free = FreeSpans()
    >>> free.give(0, 100)
    (0, 100)
    >>> free.take(30), free.take(70), free.take(1)
    (0, 30, None)
    >>> free.give(0, 30), free.give(30, 70)
    ((0, 30), (0, 100))
    """

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self.free_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Takes ``nbytes`` from the smallest range that holds them; returns the start, or None if no range does."""
        index = bisect_left(self._by_size, (nbytes, -1))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self.remove(start)
        if size > nbytes:
            self._add(start + nbytes, size - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> tuple[int, int]:
        """Frees a range; returns the start and the size in bytes of the free range that it now belongs to."""
        after = start + nbytes
        if after in self._size_at:
            nbytes += self.remove(after)
        if start in self._start_before:
            before = self._start_before[start]
            nbytes += self.remove(before)
            start = before
        self._add(start, nbytes)
        return start, nbytes

    def remove(self, start: int) -> int:
        """Removes the free range that starts at ``start``; returns its bytes."""
        size = self._size_at[start]
        index = bisect_left(self._by_size, (size, start))
        # No calls between these statements: Python handles Ctrl-C at calls, and half an update would break all that
        # follows.
        del self._size_at[start]
        del self._start_before[start + size]
        del self._by_size[index]
        self.free_bytes -= size
        return size

    def size_at(self, start: int) -> int:
        """Returns the bytes of the free range that starts at ``start``, or 0."""
        return self._size_at.get(start, 0)

    @property
    def largest_bytes(self) -> int:
        """The size of the largest free range, in bytes."""
        return self._by_size[-1][0] if self._by_size else 0

    def _add(self, start: int, nbytes: int) -> None:
        self._size_at[start] = nbytes
        self._start_before[start + nbytes] = start
        self.free_bytes += nbytes
        insort(self._by_size, (nbytes, start))  # last: the only call that a Ctrl-C can interrupt
