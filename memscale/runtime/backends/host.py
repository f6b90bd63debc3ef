"""The backend of a machine without an accelerator: the device is RAM, and the only tier below it is disk."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memscale.runtime.backends.protocol import Buffer, Event, Stream
from memscale.runtime.backends.trims import Trims
from memscale.runtime.engine.refusals import refuse_in_fork
from memscale.runtime.storage.arena import PAGE_BYTES
from memscale.runtime.storage.copy_pool import CopyFuture
from memscale.runtime.storage.disk import UNLIMITED_BYTES, DiskSlab, DiskTierFull, Extent
from memscale.runtime.storage.mapping import Bytes
from memscale.runtime.storage.tiers import TierUse


class _Now:
    """The event of the CPU's compute stream: always done, since the calling thread itself computes."""

    def done(self) -> bool:
        return True

    def span(self) -> None:
        # Times measured here vary between runs, and so would the prefetch depth and the peak: a step has to take the
        # memory that its simulation predicts.
        return None

    def error(self) -> None:
        return None


_NOW = _Now()


@dataclasses.dataclass(frozen=True, eq=False)
class DiskBuffer:
    """Bytes on disk."""

    extent: Extent
    tier: str = "disk"

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes


class HostBackend:
    """Moves CPU tensors to disk and back, in the threads of the disk tier.

    Args:
        directory: the directory of the disk tier's unnamed file; None is the first temporary directory not in RAM.
        disk_bytes: the most bytes on disk; None is all that the disk has.
        threads: how many transfers run at a time.
    """

    tiers: tuple[str, ...] = ("disk",)
    together_bytes = 0  # the threads of the disk tier take most of the time of a small copy, not the caller

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, disk_bytes: int | None = None, threads: int = 2
    ) -> None:
        self._disk_bytes = UNLIMITED_BYTES if disk_bytes is None else disk_bytes
        self._directory = directory
        self._threads = threads
        self._slab: DiskSlab | None = None
        self._making = threading.Lock()  # guards the creation of the one slab file
        self._trims = Trims()
        self._process = os.getpid()

    def allocate(self, nbytes: int, tier: str) -> DiskBuffer | None:
        refuse_in_fork(self._process)
        if self._disk_bytes < PAGE_BYTES:
            return None
        with self._making:
            if self._slab is None:
                try:
                    self._slab = DiskSlab(self._directory, cap_bytes=self._disk_bytes, threads=self._threads)
                except DiskTierFull:
                    return None
        extent = self._slab.reserve(nbytes)
        return None if extent is None else DiskBuffer(extent)

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        """Frees the extent; the slab itself waits for transfers in flight."""
        assert isinstance(buffer, DiskBuffer)
        assert self._slab is not None
        self._slab.free(buffer.extent)

    def map(self, buffer: Buffer) -> Bytes:
        """Maps the buffer; see `DiskSlab.map` for when it raises `RuntimeUnavailable`."""
        assert isinstance(buffer, DiskBuffer)
        assert self._slab is not None
        return self._slab.map(buffer.extent)

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        refuse_in_fork(self._process)
        self._trims.after(nbytes)
        # A page-aligned part of a larger tensor would need no staging, but has a storage offset, which tensor
        # subclasses compare.
        return like.new_empty(nbytes)

    def discard(self, tensor: torch.Tensor) -> None:
        self._trims.after(tensor.nbytes)

    def trim(self, *, if_grown: bool = False) -> None:
        if not if_grown:  # malloc returns its cache page by page, so fragmentation is no reason to trim
            self._trims.now()

    def lend(self, tensor: torch.Tensor) -> None:
        """See `Backend.lend`."""

    def compute_stream(self) -> int:
        """Returns 0: the calling thread is its own compute stream, and has no work queued."""
        return 0

    def record(self, stream: int | None = None) -> Event:
        return _NOW

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> CopyFuture[Any]:
        for event in after:
            self.wait(event)
        assert self._slab is not None
        if isinstance(source, torch.Tensor):
            assert isinstance(target, DiskBuffer)
            return self._slab.write(source, target.extent)
        assert isinstance(source, DiskBuffer)
        assert isinstance(target, torch.Tensor)
        return self._slab.read(source.extent, target)

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> Event:
        raise AssertionError(f"{len(sources)} tensors for one buffer, and together_bytes is {self.together_bytes}")

    def wait(self, event: Event, stream: int | None = None) -> None:
        if isinstance(event, CopyFuture):
            event.wait()

    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread, which is the compute stream."""
        self.wait(event)

    def clock(self) -> float:
        return time.perf_counter()

    def usage(self) -> Mapping[str, TierUse]:
        return {"disk": TierUse() if self._slab is None else self._slab.usage()}
