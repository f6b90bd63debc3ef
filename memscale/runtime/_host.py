"""The backend of a machine without an accelerator: the device is RAM, and the tier below it is disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from memscale.runtime._arena import PAGE_BYTES
from memscale.runtime._disk import DiskSlab, DiskTierFull, Extent
from memscale.runtime._protocol import Buffer, Event, Stream

# Files are preallocated, so the first is small; each further one is as large as all before it.
_FIRST_SLAB_BYTES = 1 << 30
# Of the disk's free bytes, where the caller gives no cap: others write to it too.
_SHARE_OF_FREE_DISK = 0.5


class _Now:
    """The event of a stream that is never behind: the calling thread computes, so all it was given is done."""

    def done(self) -> bool:
        return True

    def span(self) -> None:
        return None

    def error(self) -> None:
        return None


class Transfer:
    """The event behind a read or a write of the disk."""

    def __init__(self, future: Future[Any], clock: float) -> None:
        self._future = future
        self._start = clock
        self._stop: float | None = None
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        self._stop = time.perf_counter()

    def done(self) -> bool:
        return self._future.done()

    def span(self) -> tuple[float, float] | None:
        return None if self._stop is None else (self._start, self._stop)

    def error(self) -> BaseException | None:
        return self._future.exception() if self._future.done() else None

    def wait(self) -> None:
        self._future.exception()


class DiskBuffer:
    """Bytes on disk: room that was found, then an extent once a write into it is done."""

    tier = "disk"

    def __init__(self, slab: DiskSlab, nbytes: int) -> None:
        self.slab = slab
        self.nbytes = nbytes
        self.written: Future[Extent] | None = None


class HostBackend:
    """Moves CPU tensors to disk and back, on the threads of the disk tier.

    Args:
        directory: where the files without a name are; `None` is the system's temporary directory.
        disk_bytes: the most bytes on disk; `None` is half of what is free there.
    """

    tiers = ("disk",)

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, disk_bytes: int | None = None) -> None:
        self._directory = directory
        if disk_bytes is None:
            free_bytes = shutil.disk_usage(directory or tempfile.gettempdir()).free
            disk_bytes = int(free_bytes * _SHARE_OF_FREE_DISK)
        self._cap_bytes = disk_bytes
        self._slabs: list[DiskSlab] = []
        self._high_water_bytes = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, tier: str) -> DiskBuffer | None:
        """See `Backend.allocate`."""
        with self._lock:
            used = [slab.used_bytes for slab in self._slabs]
            room = nbytes + -nbytes % PAGE_BYTES
            found = next((s for s, taken in zip(self._slabs, used, strict=True) if s.cap_bytes - taken >= room), None)
            if found is None:
                found = self._grow(room)
            if found is None:
                return None
            self._high_water_bytes = max(self._high_water_bytes, sum(used) + room)
            return DiskBuffer(found, nbytes)

    def _grow(self, room: int) -> DiskSlab | None:
        total = sum(slab.cap_bytes for slab in self._slabs)
        size = min(max(room, total, _FIRST_SLAB_BYTES), self._cap_bytes - total)
        if size < room:
            return None
        try:
            slab = DiskSlab(self._directory, cap_bytes=size)
        except DiskTierFull:  # somebody else filled the disk
            return None
        self._slabs.append(slab)
        return slab

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        """See `Backend.free`. The slab itself waits for reads that are under way."""
        assert isinstance(buffer, DiskBuffer)
        slab, written = buffer.slab, buffer.written
        if written is not None:
            written.add_done_callback(lambda done: None if done.exception() else slab.free(done.result()))

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """See `Backend.empty`. On a page boundary, where a read needs no staging."""
        whole = like.new_empty(nbytes + PAGE_BYTES - 1)
        start = -whole.data_ptr() % PAGE_BYTES
        return whole[start : start + nbytes]

    def record(self, stream: Stream) -> Event:
        """See `Backend.record`."""
        return _Now()

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Transfer:
        """See `Backend.copy`."""
        for event in after:
            self.wait(event)
        start = self.clock()
        if isinstance(source, torch.Tensor):
            assert isinstance(target, DiskBuffer)
            target.written = _write(target.slab, source)
            return Transfer(target.written, start)
        assert isinstance(source, DiskBuffer)
        assert isinstance(target, torch.Tensor)
        assert source.written is not None
        return Transfer(source.slab.read(source.written.result(), target), start)

    def wait(self, event: Event) -> None:
        """See `Backend.wait`."""
        if isinstance(event, Transfer):
            event.wait()

    def clock(self) -> float:
        """See `Backend.clock`."""
        return time.perf_counter()

    def high_water_bytes(self) -> Mapping[str, int]:
        """See `Backend.high_water_bytes`."""
        return {"disk": self._high_water_bytes}


def _write(slab: DiskSlab, source: torch.Tensor) -> Future[Extent]:
    try:
        return slab.write(source)
    except DiskTierFull as error:  # in pieces: there was room, but not in one piece
        failed: Future[Extent] = Future()
        failed.set_exception(error)
        return failed
