"""`Arena`: large slabs of memory, cut into blocks of exactly the requested size.

PyTorch's pinned allocator and CuPy's pool round a request up to a power of two, which wastes 14 % to 87 % for the
activations of a Llama block; CuPy's pool also reuses a block while a copy still reads it. A block of an arena has its
tensor's size, and is reused only after the events it was freed with.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from memscale.runtime.storage.spans import FreeSpans
from memscale.runtime.storage.tiers import TierUse

if TYPE_CHECKING:
    from memscale.runtime.backends.protocol import Event

# At least the system's page size, which is 16 or 64 KiB on some machines: two extents that share a page could not be
# mapped, because writing a page of one back would overwrite direct writes to the other.
PAGE_BYTES = max(4096, mmap.PAGESIZE)
# How much the arena takes from the system, and pins, at a time.
SLAB_BYTES = 256 * 1024**2
_HUGE_PAGE_BYTES = 2 * 1024**2
# `replan` saves more than this share or does nothing: pinning new memory takes seconds.
_TOLERATED_WASTE = 0.03
_serials = itertools.count()


class ArenaBlock:
    """Bytes of an arena that belong to one tensor until `Arena.give`."""

    __slots__ = ("_serial", "_span", "_tensor", "nbytes", "offset")

    def __init__(self, nbytes: int, offset: int, span: int, tensor: torch.Tensor) -> None:
        self.nbytes = nbytes
        self.offset = offset  # in the arena's address space, which joins all slabs
        self._serial = next(_serials)
        self._span = span
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, a uint8 tensor of shape [nbytes].

        Raises:
            AssertionError: the block was given back; its bytes may belong to another block.
        """
        assert self._tensor is not None, f"the block of {self.nbytes} bytes was given back and has no memory any more"
        return self._tensor


class Arena:
    """Cuts slabs into blocks of exact sizes. Grows up to a cap, and never waits.

    Thread-safe. ``give`` takes no lock, so a finalizer may call it at any moment.

    Args:
        allocate_slab: makes a uint8 tensor of the given number of bytes that starts at a multiple of ``alignment``. It
            may raise MemoryError; `take` then returns None.
        cap_bytes: the most bytes in all slabs together.
        slab_bytes: the size of a slab; a larger request gets a slab of its own.
        alignment: every block's address is a multiple of this power of two; 4096 for direct disk access.
        release_slab: called with a slab that the arena no longer uses; None only drops the reference, which is enough
            for memory that was not registered.

    >>> arena = Arena(page_aligned_memory, cap_bytes=2**20, slab_bytes=2**16)
    >>> block = arena.take(1000)
    >>> block.tensor.shape, arena.usage().reserved_bytes
    (torch.Size([1000]), 65536)
    >>> arena.take(2**21) is None
    True
    >>> arena.give(block)
    """

    def __init__(
        self,
        allocate_slab: Callable[[int], torch.Tensor],
        *,
        cap_bytes: int,
        slab_bytes: int,
        alignment: int = 512,
        release_slab: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.cap_bytes = cap_bytes
        self._slab_bytes = slab_bytes
        self._alignment = alignment
        self._allocate_slab = allocate_slab
        self._release_slab = release_slab
        self._lock = threading.Lock()
        # One address space for all slabs, with a gap after each slab, so that blocks of two slabs never join.
        self._free = FreeSpans()
        self._slabs: dict[int, torch.Tensor] = {}
        self._bases: list[int] = []
        self._next_base = 0
        # The garbage collector may run a finalizer inside `take`, in the same thread, so `give` must not take the lock.
        # Appending to a deque and removing from a set are atomic.
        self._live: set[int] = set()
        self._given: deque[tuple[ArenaBlock, tuple[Event, ...]]] = deque()
        self._in_use_bytes = self._high_water_bytes = 0
        self._in_use_span = self._high_water_span = self._planned_span = 0
        self._reserved_bytes = 0

    def take(self, nbytes: int) -> ArenaBlock | None:
        """Returns a block of ``nbytes``, or None if the cap or the system allows no more."""
        span = max(_round_up(nbytes, self._alignment), self._alignment)
        with self._lock:
            self._reclaim_finished()
            start = self._free.take(span)
            if start is None and self._given:
                self._reclaim_all_finished()
                start = self._free.take(span)
            if start is None and self._grow(span):
                start = self._free.take(span)
            if start is None:
                return None
            base = self._bases[bisect_right(self._bases, start) - 1]
            block = ArenaBlock(nbytes, start, span, self._slabs[base][start - base : start - base + nbytes])
            self._live.add(block._serial)
            self._in_use_bytes += nbytes
            self._in_use_span += span
            self._high_water_bytes = max(self._high_water_bytes, self._in_use_bytes)
            self._high_water_span = max(self._high_water_span, self._in_use_span)
            return block

    def give(self, block: ArenaBlock, *, after: Iterable[Event] = ()) -> None:
        """Gives a block back; its bytes are reused after the events in ``after``.

        Raises:
            AssertionError: the block was given back before, or belongs to another arena.
        """
        events = tuple(after)
        try:
            self._live.remove(block._serial)
        except KeyError:
            raise AssertionError(
                f"a block of {block.nbytes} bytes was given back twice, or to an arena that it is not from"
            ) from None
        block._tensor = None
        self._given.append((block, events))

    def replan(self) -> bool:
        """If no block is in use, replaces the slabs by one slab of the highest use so far; returns whether it did.

        The first step does not know the sizes to come and leaves the ends of its slabs empty; later steps are alike and
        fit one slab exactly. The call costs an allocation, and does nothing if it would save less than 3 % or was done
        for the same peak before.
        """
        with self._lock:
            self._reclaim_all_finished()
            target = min(_round_up(self._high_water_span, PAGE_BYTES), self.cap_bytes)
            # Slabs added since a plan for the same peak are due to fragmentation, which a new plan would repeat.
            if self._in_use_span or target == self._planned_span:
                return False
            if self._reserved_bytes <= target * (1 + _TOLERATED_WASTE):
                return False
            self._drop_free_slabs()
            self._planned_span = target
            # If the system refuses the slab, the arena is empty and grows slab by slab again.
            self._add_slab(target)
            return True

    def usage(self) -> TierUse:
        """Returns the arena's present and highest use."""
        with self._lock:
            self._reclaim_all_finished()
            free = self._free
            return TierUse(self._high_water_bytes, self._reserved_bytes, free.free_bytes, free.largest_bytes)

    def _reclaim_finished(self) -> None:
        """Frees finished blocks at the head of the queue only: events of one stream finish in order, and it is fast."""
        while self._given and all(event.done() for event in self._given[0][1]):
            self._reclaim(self._given.popleft()[0])

    def _reclaim_all_finished(self) -> None:
        for _ in range(len(self._given)):
            # An event that raises leaves its block in the queue.
            if all(event.done() for event in self._given[0][1]):
                self._reclaim(self._given.popleft()[0])
            else:
                self._given.rotate(-1)

    def _reclaim(self, block: ArenaBlock) -> None:
        self._free.give(block.offset, block._span)
        self._in_use_bytes -= block.nbytes
        self._in_use_span -= block._span

    def _grow(self, span: int) -> bool:
        """Adds a slab of at least ``span`` bytes; drops free slabs first if the cap leaves no room otherwise."""
        if span > self.cap_bytes - self._reserved_bytes:
            if span > self.cap_bytes - self._reserved_bytes + self._wholly_free_bytes():
                return False
            self._drop_free_slabs()
        room = self.cap_bytes - self._reserved_bytes
        usual = max(span, min(self._slab_bytes, room // self._alignment * self._alignment))
        if self._add_slab(usual) or (span < usual and self._add_slab(span)):
            return True
        return bool(self._drop_free_slabs()) and self._add_slab(span)

    def _add_slab(self, nbytes: int) -> bool:
        try:
            slab = self._allocate_slab(nbytes)
        except MemoryError:
            return False
        assert slab.nbytes == nbytes
        assert slab.data_ptr() % self._alignment == 0
        base = self._next_base
        self._next_base = base + nbytes + self._alignment
        self._slabs[base] = slab
        self._bases.append(base)
        self._free.give(base, nbytes)
        self._reserved_bytes += nbytes
        return True

    def _wholly_free_bytes(self) -> int:
        return sum(slab.nbytes for base, slab in self._slabs.items() if self._free.size_at(base) == slab.nbytes)

    def _drop_free_slabs(self) -> int:
        dropped_bytes = 0
        for base, slab in list(self._slabs.items()):
            if self._free.size_at(base) != slab.nbytes:
                continue
            self._free.remove(base)
            del self._slabs[base]
            self._bases.remove(base)
            self._reserved_bytes -= slab.nbytes
            dropped_bytes += slab.nbytes
            if self._release_slab is not None:
                self._release_slab(slab)
        return dropped_bytes


def page_aligned_memory(nbytes: int) -> torch.Tensor:
    """Returns a uint8 tensor of shape [nbytes] that starts on a page, in huge pages if possible, all resident.

    Raises:
        MemoryError: the system refuses.

    >>> page_aligned_memory(10_000).data_ptr() % PAGE_BYTES
    0
    """
    try:
        # Python's default is shared memory, which gets no huge pages and is overcommitted by other rules.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        memory = mmap.mmap(-1, max(nbytes, 1), **private)
    except OSError as error:
        raise MemoryError(f"the system refuses {nbytes} bytes: {error}") from error
    if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages returns EINVAL.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    # Touched now: the process then holds what the budget has counted, and copies meet no page faults.
    tensor[::PAGE_BYTES] = 0
    return tensor


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
