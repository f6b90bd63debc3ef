"""`DiskSlab`: moved tensors on disk, in one slab file, read and written by a small thread pool."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from memscale.core import CorrectnessError, RuntimeUnavailable
from memscale.runtime.storage.arena import PAGE_BYTES
from memscale.runtime.storage.copy_pool import CopyFuture, CopyPool
from memscale.runtime.storage.mapping import Bytes, Mapping
from memscale.runtime.storage.slab_file import DiskTierError, DiskTierFull, FileIO, SlabFile, bytes_of
from memscale.runtime.storage.spans import FreeSpans
from memscale.runtime.storage.tiers import TierUse

__all__ = ["DiskSlab", "DiskTierError", "DiskTierFull", "Extent", "FileIO"]

T = TypeVar("T")

UNLIMITED_BYTES = 1 << 62  # larger than any disk
_FIRST_BYTES = 64 * 1024**2


class Extent:
    """Bytes on disk that belong to one tensor until they are freed."""

    __slots__ = ("_mapping", "_pieces", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self._pieces: dict[int, int] = {}  # the number of bytes written, by their offset
        self._mapping: weakref.ref[Mapping] | None = None  # set by `map`, valid while somebody uses the mapping

    @property
    def span(self) -> int:
        """The bytes that the extent occupies, in whole pages."""
        return _in_pages(self.nbytes)


class DiskSlab:
    """Stores tensors on disk, in one preallocated file without a name, which the system deletes with the process.

    The file doubles when it is full, up to its cap. Reads and writes bypass the page cache if the filesystem allows it,
    and are fastest for memory that starts on a page. Thread-safe; ``free`` takes no lock, so a finalizer may call it at
    any moment.

    Args:
        directory: the directory of the file; None is the first temporary directory that is not in RAM.
        cap_bytes: the largest size of the file; at least one page.
        first_bytes: the first size of the file, if the cap and the filesystem allow it.
        threads: how many transfers run at a time.
        io: the system calls, for tests.

    Raises:
        DiskTierFull: the filesystem is full.
        RuntimeUnavailable: no such file can be made here.

    >>> slab = DiskSlab(cap_bytes=2**20)
    >>> extent = slab.write(torch.arange(10, dtype=torch.uint8), slab.reserve(10)).result()
    >>> into = torch.empty(10, dtype=torch.uint8)
    >>> slab.read(extent, into).result()
    >>> into.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> slab.free(extent)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        cap_bytes: int,
        first_bytes: int = _FIRST_BYTES,
        threads: int = 2,
        io: FileIO | None = None,
    ) -> None:
        self.cap_bytes = cap_bytes // PAGE_BYTES * PAGE_BYTES
        first_bytes, io = _in_pages(min(first_bytes, self.cap_bytes)), io or FileIO()
        try:
            self._file = SlabFile(directory, first_bytes, io)
        except DiskTierFull:  # the requests may be smaller than the first size
            first_bytes = PAGE_BYTES
            self._file = SlabFile(directory, first_bytes, io)
        self._copy_pool = CopyPool(threads, "disk")
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._used_bytes = self._high_water_bytes = 0
        self._spans = FreeSpans()
        self._spans.give(0, first_bytes)
        # The garbage collector may free an extent while this thread holds the lock. So `free` and the ends of transfers
        # only append here, and the next holder of the lock processes the queues.
        self._live: set[Extent] = set()
        self._freed: deque[Extent] = deque()
        self._ended: deque[Extent] = deque()
        self._transfers: Counter[Extent] = Counter()

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._file.direct

    def usage(self) -> TierUse:
        """Returns the present and highest use of the file, in whole pages."""
        with self._lock:
            self._take_up_ended()
            return TierUse(
                self._high_water_bytes, self._file.size_bytes, self._spans.free_bytes, self._spans.largest_bytes
            )

    def reserve(self, nbytes: int) -> Extent | None:
        """Returns an extent of ``nbytes``, or None if neither the cap nor the filesystem has room for it in one piece.

        Raises:
            RuntimeUnavailable: this process is a fork of the slab's owner.
        """
        file, span = self._own_file(), _in_pages(nbytes)
        with self._lock:
            self._take_up_ended()
            offset = self._spans.take(span)
            if offset is None and self._grow(file, span):
                offset = self._spans.take(span)
            if offset is None:
                return None
            self._used_bytes += span
            self._high_water_bytes = max(self._high_water_bytes, self._used_bytes)
            extent = Extent(offset, nbytes)
            self._live.add(extent)
            return extent

    def map(self, extent: Extent) -> Bytes:
        """Returns the extent's bytes as memory that the CPU, also in a fork of this process, reads and writes in place.

        A later ``read`` sees what was written there; what ``write`` wrote is visible once its future is done. From now
        on both go through the page cache, and leave none of the extent in this process's memory. The mapping lives as
        long as an array or tensor made of it. Pages are read as they are touched; a disk that fails then raises SIGBUS.

        Args:
            extent: an extent that was neither mapped nor written before. The array must not be used after `free`.

        Raises:
            AssertionError: the extent was mapped, written or freed before, or belongs to another slab.
            RuntimeUnavailable: this process is a fork of the slab's owner; or the filesystem does not preallocate, so
                that a full disk would kill the process, or does not map files.
        """
        file = self._own_file()
        with self._lock:
            self._take_up_ended()
            assert extent in self._live, f"the extent of {extent.nbytes} bytes at {extent.offset} was freed"
            is_new = extent._mapping is None and not extent._pieces and not self._transfers[extent]
            assert is_new, f"the extent of {extent.nbytes} bytes at {extent.offset} was mapped or copied before"
            mapping = file.map(extent.offset, extent.span)
            extent._mapping = weakref.ref(mapping)
        return mapping.bytes()[: extent.nbytes]

    def write(self, source: torch.Tensor, extent: Extent, *, at: int = 0) -> CopyFuture[Extent]:
        """Starts to write; ``source``, a contiguous uint8 CPU tensor, must not change until the future is done.

        If the disk fails, the future raises DiskTierFull or DiskTierError, and the bytes exist in ``source`` only.

        Args:
            source: the bytes.
            extent: the target.
            at: the first byte of the extent to write, a multiple of the page.

        Raises:
            AssertionError: the piece does not fit into the extent, or the extent was freed or belongs to another slab.
            RuntimeUnavailable: this process is a fork of the slab's owner.
        """
        mapping = self._mapping_of(extent)

        def run(file: SlabFile) -> Extent:
            if mapping is not None:
                mapping.write(np.asarray(bytes_of(source)), at)
            else:
                file.write(source, extent.offset + at)
                extent._pieces[at] = source.nbytes
            return extent

        return self._start(run, extent, source, at)

    def read(self, extent: Extent, into: torch.Tensor, *, at: int = 0) -> CopyFuture[None]:
        """Starts to read a written piece, or any piece of a mapped extent; ``into`` is valid once the future is done.

        The future raises DiskTierError if the disk fails, and CorrectnessError if the bytes were never written.

        Args:
            extent: the source. If it is freed before the future is done, its room is reused only afterwards.
            into: a contiguous uint8 CPU tensor of the piece's size.
            at: the first byte of the piece in the extent.

        Raises:
            AssertionError: the piece does not fit into the extent, or the extent was freed or belongs to another slab.
            RuntimeUnavailable: this process is a fork of the slab's owner.
        """
        mapping = self._mapping_of(extent)

        def run(file: SlabFile) -> None:
            if mapping is not None:
                mapping.read(np.asarray(bytes_of(into)), at)
                return
            written_bytes = extent._pieces.get(at, 0)
            if written_bytes != into.nbytes:
                raise CorrectnessError(
                    f"{into.nbytes} bytes are read from the disk tier where {written_bytes} were written; read the "
                    f"pieces that were written, after they were"
                )
            file.read(into, extent.offset + at)

        return self._start(run, extent, into, at)

    def free(self, extent: Extent) -> None:
        """Frees the extent; its room is reused after the transfers in flight.

        Raises:
            AssertionError: the extent was freed before, or belongs to another slab.
        """
        try:
            self._live.remove(extent)
        except KeyError:
            raise AssertionError(f"the extent of {extent.nbytes} bytes at {extent.offset} was freed twice") from None
        self._freed.append(extent)

    def _own_file(self) -> SlabFile:
        if os.getpid() != self._process:
            raise RuntimeUnavailable(
                f"process {os.getpid()} is a fork of {self._process}, whose disk tier it cannot use: the threads that "
                f"move bytes are not in the fork; start processes with 'spawn', or offload in one of them only"
            )
        return self._file

    def _start(self, run: Callable[[SlabFile], T], extent: Extent, data: torch.Tensor, at: int) -> CopyFuture[T]:
        """Queues ``run``, and keeps the extent's room from being reused before it has ended."""
        file = self._own_file()
        fits = 0 <= at <= extent.nbytes - data.nbytes and at % PAGE_BYTES == 0
        assert data.dtype == torch.uint8
        assert data.is_contiguous()
        assert fits, f"{data.nbytes} bytes for byte {at} on of an extent of {extent.nbytes}"
        with self._lock:
            assert extent in self._live, f"the extent of {extent.nbytes} bytes at {extent.offset} was freed"
            self._transfers[extent] += 1

        ended = self._ended

        def transfer() -> T:
            try:
                return run(file)
            finally:
                ended.append(extent)

        return self._copy_pool.submit(transfer)

    def _mapping_of(self, extent: Extent) -> Mapping | None:
        """Returns the memory of a mapped extent, mapped again if nobody holds it; None if it was never mapped.

        A mapped extent is never accessed directly: open(2) warns that direct access may miss data in the page cache.
        """
        if extent._mapping is None:
            return None
        return extent._mapping() or self._own_file().map(extent.offset, extent.span)

    def _grow(self, file: SlabFile, span: int) -> bool:
        room = self.cap_bytes - file.size_bytes
        usual = max(span, min(file.size_bytes, room))
        for nbytes in (usual, span):
            if nbytes <= room:
                start = file.size_bytes
                with contextlib.suppress(DiskTierError):
                    file.extend(nbytes)
                    self._spans.give(start, nbytes)
                    return True
        return False

    def _take_up_ended(self) -> None:
        """Processes the queues that `free` and the ends of transfers have filled. The lock is held."""
        while self._ended:
            self._transfers[self._ended.popleft()] -= 1
        for _ in range(len(self._freed)):
            extent = self._freed.popleft()
            if self._transfers[extent]:
                self._freed.append(extent)
            else:
                del self._transfers[extent]
                self._spans.give(extent.offset, extent.span)
                self._used_bytes -= extent.span


def _in_pages(nbytes: int) -> int:
    return max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES
