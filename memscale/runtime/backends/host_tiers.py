"""Allocates on the tiers below an accelerator: pinned memory, pageable memory and disk, each up to its cap."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from memscale.core import TIERS, RuntimeUnavailable
from memscale.runtime.backends.protocol import Event
from memscale.runtime.storage.arena import PAGE_BYTES, SLAB_BYTES, Arena, ArenaBlock, page_aligned_memory
from memscale.runtime.storage.budget import HostBudget
from memscale.runtime.storage.disk import UNLIMITED_BYTES, DiskSlab, DiskTierFull, Extent
from memscale.runtime.storage.mapping import Bytes
from memscale.runtime.storage.tiers import TierUse, at_or_below


@dataclasses.dataclass(frozen=True, eq=False)
class HostBuffer:
    """Bytes on one tier of the host."""

    tier: str
    nbytes: int
    room: ArenaBlock | Extent

    @property
    def place(self) -> tuple[str, int]:
        """The tier and the first byte, which tell whether two buffers were the same memory at different times."""
        return self.tier, self.room.offset


class HostTiers:
    """Allocates bytes on the requested tier, or on the next tier below that has room.

    Thread-safe. ``free`` takes no lock, so a finalizer may call it at any moment.

    Args:
        pin: registers a slab for copies without the CPU; raises MemoryError if the system pins no more.
        unpin: reverses `pin`.
        pinned_bytes: the most bytes that are pinned; None is limited by `budget` alone.
        budget: the RAM that pinned and pageable memory may take together.
        disk_bytes: the most bytes on disk; None is all that the disk has.
        disk_directory: the directory of the disk tier's file; None is the first temporary directory that is not in RAM.
    """

    def __init__(
        self,
        pin: Callable[[torch.Tensor], None],
        unpin: Callable[[torch.Tensor], None],
        *,
        pinned_bytes: int | None,
        budget: HostBudget,
        disk_bytes: int | None = None,
        disk_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._budget = budget
        self._arenas = {
            "pinned": Arena(
                self._new_pinned,
                cap_bytes=UNLIMITED_BYTES if pinned_bytes is None else pinned_bytes,
                slab_bytes=SLAB_BYTES,
                release_slab=self._end_pinned,
            ),
            "pageable": Arena(
                self._new_pageable, cap_bytes=UNLIMITED_BYTES, slab_bytes=SLAB_BYTES, release_slab=self._end_pageable
            ),
        }
        self._disk_bytes = UNLIMITED_BYTES if disk_bytes is None else disk_bytes
        self._disk_directory = disk_directory
        self._disk: DiskSlab | None = None
        self._lock = threading.Lock()
        self._live: set[HostBuffer] = set()
        self._leaving: deque[tuple[Extent, Sequence[Event]]] = deque()

    @property
    def disk(self) -> DiskSlab:
        """The slab file of the disk tier; exists after the first allocation there."""
        assert self._disk is not None
        return self._disk

    def allocate(self, nbytes: int, tier: str) -> HostBuffer | None:
        with self._lock:
            if not self._live:  # between two steps: the next step will need what the last one did
                for arena in self._arenas.values():
                    arena.replan()
            for name in at_or_below(TIERS, tier):
                room = self._take_disk(nbytes) if name == "disk" else self._arenas[name].take(nbytes)
                if room is not None:
                    buffer = HostBuffer(name, nbytes, room)
                    self._live.add(buffer)
                    return buffer
            return None

    def free(self, buffer: HostBuffer, *, after: Sequence[Event]) -> None:
        if isinstance(buffer.room, Extent):
            self._leaving.append((buffer.room, after))
        else:
            self._arenas[buffer.tier].give(buffer.room, after=after)
        self._live.discard(buffer)

    def map(self, buffer: HostBuffer) -> Bytes:
        """Maps the buffer; see `DiskSlab.map` for when it raises `RuntimeUnavailable`."""
        if isinstance(buffer.room, Extent):
            return self.disk.map(buffer.room)
        # The array keeps the slab's memory alive: a tier that shrinks unpins its slabs and does not unmap them.
        found: Bytes = buffer.room.tensor.numpy()
        return found

    def usage(self) -> Mapping[str, TierUse]:
        arenas = {name: arena.usage() for name, arena in self._arenas.items()}
        return {**arenas, "disk": TierUse() if self._disk is None else self._disk.usage()}

    def _take_disk(self, nbytes: int) -> Extent | None:
        for _ in range(len(self._leaving)):
            if all(event.done() for event in self._leaving[0][1]):
                self.disk.free(self._leaving.popleft()[0])
            else:
                self._leaving.rotate(-1)
        if self._disk is None and self._disk_bytes >= PAGE_BYTES:
            try:
                self._disk = DiskSlab(self._disk_directory, cap_bytes=self._disk_bytes)
            except DiskTierFull:
                return None
            except RuntimeUnavailable:
                if self._disk_directory is not None:  # the user named a directory that does not work
                    raise
                self._disk_bytes = 0  # this machine has no disk, as in some containers: do not try again
        return None if self._disk is None else self._disk.reserve(nbytes)

    def _new_pageable(self, nbytes: int) -> torch.Tensor:
        if not self._budget.reserve(nbytes):
            raise MemoryError(f"{nbytes} bytes more are over the budget of the host")
        try:
            return page_aligned_memory(nbytes)
        except BaseException:
            self._budget.release(nbytes)
            raise

    def _end_pageable(self, slab: torch.Tensor) -> None:
        self._budget.release(slab.nbytes)

    def _new_pinned(self, nbytes: int) -> torch.Tensor:
        slab = self._new_pageable(nbytes)
        try:
            self._pin(slab)
        except BaseException:
            self._end_pageable(slab)
            raise
        return slab

    def _end_pinned(self, slab: torch.Tensor) -> None:
        self._unpin(slab)
        self._end_pageable(slab)
