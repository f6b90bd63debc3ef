"""The memory of a CPU over a step: pages new to the process, and the contents of the caches."""

from __future__ import annotations

from collections.abc import Sequence

from memscale.simulation.dispatch.trace_builder import StorageRecord
from memscale.simulation.kernels.caches import Caches

# The share of an allocation besides moving tensors that malloc takes from the system after a trim. With `offload()`
# operators of three models found 0.25 to 0.4 of their results in place, and copies 0.25 to 0.5. A heap followed chunk
# by chunk gives 0.45 to 0.6: a fresh heap is less fragmented than a process's.
_NEW_SHARE = 2 / 3


class NewMemory:
    """Counts the bytes that malloc returned to the system and a step asks for again.

    A step reuses the bytes that the step before freed, until a runtime trims malloc: at most the peak at once.

    >>> memory = NewMemory()
    >>> memory.born(96)
    >>> memory.died(96)
    >>> memory.new_bytes(96)
    0
    >>> memory.trim()
    >>> memory.new_bytes(96)
    64
    >>> memory.born(96)
    >>> memory.new_bytes(96)
    32
    """

    def __init__(self) -> None:
        self._used_bytes = self._most_bytes = self._given_back_bytes = 0

    def trim(self) -> None:
        """Notes that malloc gives back what is free."""
        self._given_back_bytes = self._most_bytes

    def new_bytes(self, nbytes: int) -> int:
        """Returns the bytes of a new storage of `nbytes` that malloc would have to get from the system."""
        return min(int(nbytes * _NEW_SHARE), self._given_back_bytes)

    def born(self, nbytes: int) -> None:
        """Notes that a storage was allocated."""
        self._given_back_bytes -= self.new_bytes(nbytes)
        self._used_bytes += nbytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)

    def died(self, nbytes: int) -> None:
        """Notes that a storage was freed."""
        self._used_bytes -= nbytes


class CacheContents:
    """Tracks which storages were used last, and so are in the caches.

    Args:
        caches: the caches of the device.

    A storage leaves a cache as further bytes pass through. A new storage takes the place of a dead one of its size, the
    last one first, as allocators do.

    >>> contents = CacheContents(Caches((0, 1 << 20, 1 << 24), (0.0, 0.0, 1.0)))
    >>> weight, state = StorageRecord(1 << 20, -1), StorageRecord(1 << 24, -1)
    >>> weight.used_at = state.used_at = -1
    >>> [contents.missing_share([(record, record.nbytes)]) for record in (weight, weight, state, weight)]
    [1.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._passed_bytes = 0
        self._places: dict[int, list[int]] = {}  # size of dead storages -> the time of each one's last use

    def missing_share(self, used: Sequence[tuple[StorageRecord, int]], made: Sequence[int] = ()) -> float:
        """Returns the share of an operator's bytes that is in no cache when it begins.

        The kernel's measured time includes misses of large operands, since repeated calls miss those too.

        Args:
            used: the storages of the arguments, and the bytes used of each.
            made: the sizes of the results.
        """
        operands = [
            *((record.used_at, nbytes) for record, nbytes in used),
            *((places[-1] if (places := self._places.get(nbytes)) else -1, nbytes) for nbytes in made),
        ]
        total = sum(nbytes for _, nbytes in operands)
        missing = 0.0
        for used_at, nbytes in operands:
            since = self._passed_bytes - used_at + nbytes
            missing += nbytes * (1.0 if used_at < 0 else self._caches.lost(total, since))
        self._passed_bytes += total
        for record, _ in used:
            record.used_at = self._passed_bytes
        return missing / total if total else 0.0

    def born(self, record: StorageRecord) -> None:
        """Notes that `record` was made by the operator that just ran."""
        record.used_at = self._passed_bytes
        if places := self._places.get(record.nbytes):
            places.pop()

    def died(self, record: StorageRecord) -> None:
        """Notes that `record` died."""
        self._places.setdefault(record.nbytes, []).append(record.used_at)
