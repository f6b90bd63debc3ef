"""What of a device's memory is still in its caches, by how much else was used since."""

from __future__ import annotations

from collections.abc import Sequence

from memscale.simulation.dispatch.trace_builder import StorageRecord
from memscale.simulation.kernels.caches import Caches


class CacheContents:
    """Follows which storages were used last.

    Args:
        caches: of the device.

    A storage goes as other uses go through more and more bytes. A new one takes the place of one of its size that died,
    as allocators do, the last one first.

    >>> contents = CacheContents(Caches((0, 1 << 20, 1 << 24), (0.0, 0.0, 1.0)))
    >>> weight, state = StorageRecord(1 << 20, -1), StorageRecord(1 << 24, -1)
    >>> weight.used_at = state.used_at = -1
    >>> [contents.missing_share([(record, record.nbytes)]) for record in (weight, weight, state, weight)]
    [1.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._passed_bytes = 0
        self._places: dict[int, list[int]] = {}  # size of storages that died -> when each was used last

    def missing_share(self, used: Sequence[tuple[StorageRecord, int]], made: Sequence[int] = ()) -> float:
        """The share of an operator's bytes that is not there when it begins; it is when the operator is through.

        Nothing is missing of what is there when the same call is made again and again: of large operands some is.

        Args:
            used: the storages of its arguments, and how much it uses of each.
            made: the sizes of those that it is about to make.
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
        """Note that `record` was made by the operator that just ran."""
        record.used_at = self._passed_bytes
        if places := self._places.get(record.nbytes):
            places.pop()

    def died(self, record: StorageRecord) -> None:
        """Note that `record` is gone."""
        self._places.setdefault(record.nbytes, []).append(record.used_at)
