"""Free ranges of an address space: what an arena in memory and a slab on disk have in common."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeSpans:
    """The free ranges of some addresses, handed out best fit first and joined again with their neighbours.

    Not thread-safe: its owner holds a lock. A search compares O(log n) sizes; n is the number of *free* ranges.

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
        """Cut ``nbytes`` from the smallest range that holds them; the start, or None where no range does."""
        index = bisect_left(self._by_size, (nbytes, -1))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self.remove(start)
        if size > nbytes:
            self._add(start + nbytes, size - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> tuple[int, int]:
        """Free a range that is not free; the (start, bytes) of the free range that it is now part of."""
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
        """Forget the free range that starts at ``start``; its bytes."""
        size = self._size_at[start]
        index = bisect_left(self._by_size, (size, start))
        # No call between these: at calls Python looks for a Ctrl-C, and one halfway would make all that follows fail.
        del self._size_at[start]
        del self._start_before[start + size]
        del self._by_size[index]
        self.free_bytes -= size
        return size

    def size_at(self, start: int) -> int:
        """The bytes of the free range that starts at ``start``, 0 where none does."""
        return self._size_at.get(start, 0)

    @property
    def largest_bytes(self) -> int:
        """The most that one :meth:`take` can get."""
        return self._by_size[-1][0] if self._by_size else 0

    def _add(self, start: int, nbytes: int) -> None:
        self._size_at[start] = nbytes
        self._start_before[start + nbytes] = start
        self.free_bytes += nbytes
        insort(self._by_size, (nbytes, start))  # the only call, and last
