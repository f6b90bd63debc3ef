"""Moved tensors on disk: one slab file, a small thread pool, and futures."""

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

UNLIMITED_BYTES = 1 << 62  # the disk ends first
_FIRST_BYTES = 64 * 1024**2


class Extent:
    """Room on disk for the bytes of one tensor, until it is freed."""

    __slots__ = ("_mapping", "_pieces", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self._pieces: dict[int, int] = {}  # what was written where: its bytes
        self._mapping: weakref.ref[Mapping] | None = None  # once it was mapped, for as long as somebody uses that

    @property
    def span(self) -> int:
        """The bytes it takes up, in whole pages."""
        return _in_pages(self.nbytes)


class DiskSlab:
    """Bytes on disk behind futures, in one preallocated file without a name: nothing survives the process.

    The file doubles when it is full, up to its cap.

    Reads and writes pass the page cache by where the filesystem can; fastest for memory that starts on a page.
    Threads may share it. ``free`` takes no lock and so may run in a finalizer at any moment.

    Args:
        directory: where the file is; None is the first temporary directory that is not in RAM.
        cap_bytes: the most that the file may grow to, at least one page.
        first_bytes: the size of the file at first, where the cap and the filesystem allow that.
        threads: how many transfers run at a time.
        io: the system calls, for tests.

    Raises:
        DiskTierFull: the filesystem is full.
        RuntimeUnavailable: there is no such file to be had here.

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
        except DiskTierFull:  # what is asked for may be less
            first_bytes = PAGE_BYTES
            self._file = SlabFile(directory, first_bytes, io)
        self._copy_pool = CopyPool(threads, "disk")
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._used_bytes = self._high_water_bytes = 0
        self._spans = FreeSpans()
        self._spans.give(0, first_bytes)
        # The collector may run a finalizer that frees an extent while this thread holds the lock, so `free` and the
        # ends of transfers only append here; whoever holds the lock next settles them.
        self._live: set[Extent] = set()
        self._freed: deque[Extent] = deque()
        self._ended: deque[Extent] = deque()
        self._transfers: Counter[Extent] = Counter()

    @property
    def direct(self) -> bool:
        """Whether transfers pass the page cache by."""
        return self._file.direct

    def usage(self) -> TierUse:
        """What the file holds, in whole pages, and held at most."""
        with self._lock:
            self._take_up_ended()
            return TierUse(
                self._high_water_bytes, self._file.size_bytes, self._spans.free_bytes, self._spans.largest_bytes
            )

    def reserve(self, nbytes: int) -> Extent | None:
        """Room for ``nbytes``, or None where neither the cap nor the filesystem leaves any in one piece.

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
        """The extent's bytes as memory that the CPU reads and writes in place, and a fork of this process too.

        What is written there, a later ``read`` brings, and what ``write`` wrote is there once its future is done. Both
        copy from and to this memory from now on, by way of the page cache, and leave none of it in this process.
        The memory goes with the last array or tensor made of it, whatever becomes of the slab. Pages are read from the
        disk as they are touched; a disk that fails then is a SIGBUS.

        Args:
            extent: one that was neither mapped nor written before. The array must not be used once it is freed.

        Raises:
            AssertionError: the extent was mapped, written or freed before, or is another slab's.
            RuntimeUnavailable: this process is a fork of the slab's owner; the filesystem does not preallocate, so that
                a full disk would kill the process, or does not map files.
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
        """Start writing; ``source``, a contiguous uint8 CPU tensor, must not change until the future is done.

        The future raises DiskTierFull or DiskTierError where the disk fails; the bytes are then in ``source`` only.

        Args:
            source: the bytes.
            extent: where to.
            at: the first byte of the extent that is written, a multiple of the page.

        Raises:
            AssertionError: the piece does not fit into the extent, which was freed, or is another slab's.
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
        """Start reading a piece that was written, or any that is mapped; ``into`` holds it once the future is done.

        The future raises DiskTierError where the disk fails, CorrectnessError where the bytes were never written.

        Args:
            extent: where from. It stays taken; freed before the future is done, it is reused only afterwards.
            into: a contiguous uint8 CPU tensor of the piece's size.
            at: the first byte of the piece in the extent.

        Raises:
            AssertionError: the piece does not fit into the extent, which was freed, or is another slab's.
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
        """Give the extent's bytes up; they are reused once the reads under way are done.

        Raises:
            AssertionError: the extent was freed before, or is another slab's.
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
        """Queue ``run``, and keep the extent's room from being reused before it has ended."""
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
        """Where the extent was mapped, its memory: still that, or again where nobody holds it any more.

        Never past the page cache instead, where what was written in place may still be: open(2) warns of that mixture.
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
        """Take up what `free` and the ends of transfers left behind. The lock is held."""
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
