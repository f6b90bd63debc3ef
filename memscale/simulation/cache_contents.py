"""What of a device's memory is still in its caches, by how much else was used since."""

from __future__ import annotations

from collections.abc import Sequence

from memscale.simulation.ledger import StorageRecord


class CacheContents:
    """Follows which storages were used last.

    Args:
        held_bytes: what the caches hold.

    A storage is there until other uses have gone through as many bytes as the cache has. A new one takes the place of
    one of its size that died, as allocators do, the last one first.

    >>> contents, weight, state = CacheContents(1 << 24), StorageRecord(1 << 20, -1), StorageRecord(1 << 24, -1)
    >>> weight.used_at = state.used_at = -1
    >>> [contents.missing_share([(record, record.nbytes)]) for record in (weight, weight, state, weight)]
    [1.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, held_bytes: int) -> None:
        self._held_bytes = held_bytes
        self._passed_bytes = 0
        self._places: dict[int, list[int]] = {}  # size of storages that died -> when each was used last

    def missing_share(self, used: Sequence[tuple[StorageRecord, int]], made: Sequence[int] = ()) -> float:
        """The share of an operator's bytes that is not there when it begins; it is when the operator is through.

        Args:
            used: the storages of its arguments, and how much it uses of each.
            made: the sizes of those that it is about to make.
        """
        total = missing = 0
        for used_at, nbytes in (
            *((record.used_at, nbytes) for record, nbytes in used),
            *((places[-1] if (places := self._places.get(nbytes)) else -1, nbytes) for nbytes in made),
        ):
            total += nbytes
            if used_at < 0 or self._passed_bytes - used_at > self._held_bytes - nbytes:
                missing += nbytes
        self._passed_bytes += total
        for record, _ in used:
            record.used_at = self._passed_bytes
        return missing / total if total else 0.0

    def born(self, record: StorageRecord) -> None:
        """Note that `record` was made by the operator that just ran."""
        record.used_at = self._passed_bytes
        if places := self._places.get(record.nbytes):
            places.pop()

    def died(self, record: StorageRecord) -> None:
        """Note that `record` is gone."""
        self._places.setdefault(record.nbytes, []).append(record.used_at)
