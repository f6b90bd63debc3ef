"""A replay of PyTorch's CUDA caching allocator in pure Python: allocation events in, reserved bytes out.

Source of the rules and constants: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.10 to 2.14, for one
device, without CUDA graphs and private pools. A freed block is free for its own stream at once. Method names
follow the C++ functions, so that both files read side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memscale.core import ConfigError, internals
from memscale.simulation.allocator.allocator_settings import MIN_BLOCK_BYTES, MIN_LARGE_BYTES, AllocatorSettings
from memscale.simulation.allocator.block_pool import ADDRESS_BITS, Block, Pool, round_up

__all__ = ["TRIM", "TRIM_IF_GROWN", "AllocatorSettings", "Replayed", "replay"]

_MIB = 1 << 20
_SMALL_BYTES = 1 * _MIB  # kSmallSize: up to here a request goes to the small pool
_SMALL_SEGMENT_BYTES = 2 * _MIB  # kSmallBuffer
_ROUND_LARGE_BYTES = 2 * _MIB  # kRoundLarge
# The address space of an expandable segment without a capacity. With a capacity the space is 9/8 of the capacity, as in
# ExpandableSegment's constructor.
_UNLIMITED_SPACE_BYTES = 1 << 50
_TOP = 1 << (ADDRESS_BITS - 1)

_DEFAULTS = AllocatorSettings()
_ONE_STREAM: Mapping[int, int] = {}
# Events of `replay`: `TRIM` acts as `torch.cuda.empty_cache`, `TRIM_IF_GROWN` only where large blocks took more memory.
TRIM = (-1, -1)
TRIM_IF_GROWN = (-1, -2)


@dataclass(frozen=True)
class Replayed:
    """The result of `replay`: peak and final bytes, fragmentation, retries and the size of each block.

    Args:
        allocated_peak_bytes: the most bytes that blocks in use held at once, as
            ``torch.cuda.max_memory_allocated`` counts them.
        reserved_peak_bytes: the most bytes that were taken from the device at once, as
            ``torch.cuda.max_memory_reserved`` counts them.
        allocated_end_bytes: the bytes in use after the last event.
        reserved_end_bytes: the bytes taken from the device after the last event.
        fragmentation_bytes: the bytes reserved and not in use right after the event of the reserved peak.
        segments: the number of separate pieces of device memory held at the reserved peak: live ``cudaMalloc`` calls,
            or address ranges with expandable segments.
        out_of_memory_at: the index of the event that did not fit, where the replay ends; None if all events fit.
        retries: how often all cached segments were given back to make room, as
            ``torch.cuda.memory_stats()["num_alloc_retries"]`` counts.
        block_bytes: the size of the block handed out for each allocation, by its id (the last allocation of an id):
            the request rounded up, plus the remainder of the free block where a split was not worthwhile.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    allocated_end_bytes: int
    reserved_end_bytes: int
    fragmentation_bytes: int
    segments: int
    out_of_memory_at: int | None
    retries: int = 0
    block_bytes: Mapping[int, int] = field(default_factory=dict, repr=False, compare=False)


def replay(
    events: Iterable[tuple[int, int]],
    *,
    settings: AllocatorSettings = _DEFAULTS,
    capacity_bytes: int | None = None,
    streams: Mapping[int, int] = _ONE_STREAM,
    torch_version: tuple[int, int] = internals.TORCH_VERSION,
) -> Replayed:
    """Returns the bytes that PyTorch's caching allocator would hand out and reserve for ``events``.

    A 1 KiB and a 3 MiB tensor come from two segments, of 2 and of 20 MiB:

    >>> replay([(1, 1024), (2, 3 << 20)]).reserved_peak_bytes >> 20
    22
    >>> conf = AllocatorSettings(expandable_segments=True)
    >>> replay([(1, 12 << 20), (1, -(12 << 20)), (2, 13 << 20)], settings=conf).reserved_peak_bytes >> 20
    20

    Args:
        events: pairs of a block's id and its bytes, in the order of a step. Positive bytes allocate, negative
            bytes free the block of that id whatever their size, and 0 does nothing: an empty tensor has no
            block. Blocks that lived before the step come first, as allocations. `TRIM` gives cached segments back;
            `TRIM_IF_GROWN` does so if memory was taken for large blocks since the previous `TRIM_IF_GROWN`.
        settings: the options of ``PYTORCH_CUDA_ALLOC_CONF``.
        capacity_bytes: the most bytes that the process can get from the device, at least 1; None means no limit. At
            the limit, cached segments are given back and the request is tried again, as PyTorch does.
        streams: the stream of a block, by the block's id; stream 0 where an id is missing. A block that one stream
            has cached is never handed out to another stream.
        torch_version: the version of PyTorch whose allocator is replayed, (major, minor).

    Raises:
        ConfigError: an event allocates a live id or frees one that is not live, or the capacity is below 1.

    Cost: about 2 microseconds an event.
    Source: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp``. Among free blocks of one size
    the allocator takes the block of the oldest segment; before torch 2.12 it takes the block at the lowest address,
    and each ``cudaMalloc`` is assumed to return the highest address that has room, as on an H100.
    """
    if capacity_bytes is not None and capacity_bytes < 1:
        raise ConfigError(f"replay(capacity_bytes={capacity_bytes}) must be at least 1, or None for no limit")
    if capacity_bytes is not None:
        capacity_bytes = int(settings.memory_fraction * capacity_bytes)
    allocator = _Allocator(settings, capacity_bytes, older_first=torch_version >= (2, 12))
    live: dict[int, Block] = {}
    block_bytes: dict[int, int] = {}
    reserved_peak = fragmentation = segments = 0
    failed = None
    for index, (name, nbytes) in enumerate(events):
        if nbytes > 0:
            if name in live:
                raise ConfigError(f"event {index} allocates block {name}, which is live; free it first")
            block = allocator.malloc(nbytes, streams.get(name, 0))
            if block is not None:
                live[name] = block
                block_bytes[name] = block.size
            if allocator.reserved_peak > reserved_peak:
                reserved_peak = allocator.reserved_peak
                fragmentation = reserved_peak - allocator.allocated
                segments = allocator.segments
            if block is None:
                failed = index
                break
        elif (name, nbytes) == TRIM:
            allocator.trim()
        elif (name, nbytes) == TRIM_IF_GROWN:
            allocator.trim_if_grown()
        elif nbytes < 0:
            if name not in live:
                raise ConfigError(
                    f"event {index} frees block {name}, which is not live; begin with the blocks that lived before"
                )
            allocator.free(live.pop(name))
    return Replayed(
        allocated_peak_bytes=allocator.allocated_peak,
        reserved_peak_bytes=reserved_peak,
        allocated_end_bytes=allocator.allocated,
        reserved_end_bytes=allocator.reserved,
        fragmentation_bytes=fragmentation,
        segments=segments,
        out_of_memory_at=failed,
        retries=allocator.retries,
        block_bytes=block_bytes,
    )


class _Allocator:
    """The state of ``DeviceCachingAllocator``: two pools and the bytes taken from the device."""

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None, *, older_first: bool = True) -> None:
        self.settings = settings
        self.capacity = capacity_bytes
        self.max_split = settings.max_split_size_bytes
        self.expandable = settings.expandable_segments
        self.pools: dict[int, tuple[Pool, Pool]] = {}  # stream -> (small pool, large pool)
        self.allocated = self.allocated_peak = 0
        self.reserved = self.reserved_peak = 0
        self.segments = 0
        self.large_taken = 0  # bytes ever taken from the device for large blocks; never falls
        self.trimmed_at: int | None = None  # `large_taken` at the last `trim_if_grown`; None before the first
        self.retries = 0
        self.older_first = older_first
        self.ranges: list[tuple[int, int]] = []  # (begin, end) addresses of all segments, highest first

    def malloc(self, nbytes: int, stream: int) -> Block | None:
        size = self.settings.rounded_bytes(nbytes)
        if stream not in self.pools:
            large_bytes = self.settings.large_segment_bytes
            self.pools[stream] = (
                Pool(small=True, segment_bytes=_SMALL_SEGMENT_BYTES),
                Pool(small=False, segment_bytes=large_bytes),
            )
        pool = self.pools[stream][size > _SMALL_BYTES]
        block = self._get_free_block(pool, size)
        if block is None:
            block = self._alloc_block(pool, size)
            if block is None and self._release_available_cached_blocks(pool, size):
                block = self._alloc_block(pool, size)
            if block is None:
                self.trim()
                self.retries += 1
                block = self._alloc_block(pool, size)
            if block is None:
                return None
        left = block.size - size
        # should_split: the large pool splits only for a remainder over 1 MiB; the small pool and expandable segments
        # split for any remainder of at least one minimal block.
        if (
            left >= MIN_BLOCK_BYTES
            if pool.small or self.expandable
            else left > _SMALL_BYTES and (self.max_split is None or size < self.max_split)
        ):
            rest = Block(pool, block.address + size, left)
            rest.insert_after(block)
            block.size = size
            pool.insert(rest)
        self.allocated += block.size
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.pool.merge(block)
        block.pool.insert(block)

    def trim(self) -> None:
        for small, large in self.pools.values():
            self._release_blocks(large)
            self._release_blocks(small)

    def trim_if_grown(self) -> None:
        if self.trimmed_at is not None and self.large_taken > self.trimmed_at:
            self.trim()
        self.trimmed_at = self.large_taken

    def _get_free_block(self, pool: Pool, size: int) -> Block | None:
        index = bisect_left(pool.keys, size << ADDRESS_BITS)
        if index == len(pool.keys):
            return None
        block = pool.blocks[pool.keys[index]]
        if self.expandable:
            # Blocks compare by the size that they can grow to, so a larger block may be the better fit.
            while index + 1 < len(pool.keys):
                following = pool.blocks[pool.keys[index + 1]]
                if _expandable_size(following) >= _expandable_size(block):
                    break
                block = following
                index += 1
        if self.max_split is not None:
            if size < self.max_split <= block.size:
                return None
            if size >= self.max_split and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        pool.remove(block)
        return block

    def _alloc_block(self, pool: Pool, size: int) -> Block | None:
        if pool.small or size < MIN_LARGE_BYTES:  # get_allocation_size
            segment_bytes = pool.segment_bytes
        else:
            segment_bytes = round_up(size, _ROUND_LARGE_BYTES)
        if self.expandable:
            return self._try_allocate_expandable_block(pool, size)
        if not self._reserve(pool, segment_bytes):
            return None
        return self._new_segment(pool, segment_bytes)

    def _reserve(self, pool: Pool, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        if not pool.small:
            self.large_taken += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _new_segment(self, pool: Pool, nbytes: int, *, mapped: bool = True) -> Block:
        """Returns the block of a new segment: above all others with `older_first`, else at the highest free address.

        The address is aligned, so that the pages of an expandable segment begin at multiples of the page size.
        """
        align = _ROUND_LARGE_BYTES if mapped else pool.segment_bytes
        if self.older_first:
            address = round_up(self.ranges[0][1] if self.ranges else 0, align)
            self.ranges.insert(0, (address, address + nbytes))
        else:
            address = self._highest_room(nbytes, align)
        self.segments += 1
        return Block(pool, address, nbytes, mapped=mapped)

    def _highest_room(self, nbytes: int, align: int) -> int:
        end, place = _TOP, 0
        for begin, above in self.ranges:
            if end - nbytes >= above:
                break
            end = begin
            place += 1
        address = (end - nbytes) // align * align
        self.ranges.insert(place, (address, address + nbytes))
        return address

    def _release_block(self, block: Block) -> None:
        block.pool.remove(block)
        self.ranges.remove((block.address, block.address + block.size))
        self.reserved -= block.size
        self.segments -= 1

    def _release_available_cached_blocks(self, pool: Pool, size: int) -> bool:
        """Releases one unsplittable block that is large enough, or the largest ones until they add up to ``size``."""
        if self.max_split is None or self.expandable:
            return False
        wanted = max(size, self.max_split)
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if index < len(pool.keys):
            self._release_block(pool.blocks[pool.keys[index]])
            return True
        released = 0
        while released < wanted and pool.keys and pool.keys[-1] >> ADDRESS_BITS >= self.max_split:
            block = pool.blocks[pool.keys[-1]]
            released += block.size
            self._release_block(block)
        return released >= wanted

    def _release_blocks(self, pool: Pool) -> None:
        """Gives back the memory that no block in use shares: whole segments, or whole pages of expandable segments."""
        for block in [pool.blocks[key] for key in pool.keys]:
            if self.expandable:
                self._unmap_block(block)
            elif block.whole:
                self._release_block(block)

    def _find_expandable_block(self, pool: Pool, size: int) -> Block:
        """Returns the block at the lowest address from which free and unmapped neighbours add up to ``size``."""
        for address in pool.unmapped_at:
            candidate = pool.unmapped[address]
            if candidate.prev is not None and candidate.prev.free:
                candidate = candidate.prev
            room, block = 0, candidate
            while True:
                room += block.size
                if room >= size:
                    return candidate
                if block.next is None or not block.next.free:
                    break
                block = block.next
        space = _UNLIMITED_SPACE_BYTES if self.capacity is None else self.capacity + self.capacity // 8
        block = self._new_segment(pool, round_up(space, pool.segment_bytes), mapped=False)
        pool.insert(block)
        return block

    def _try_allocate_expandable_block(self, pool: Pool, size: int) -> Block | None:
        block = self._find_expandable_block(pool, size)
        if not block.mapped and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.next
            assert unmapped is not None
            if not self._map_block(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped  # `_map_block` has merged the free block before it into it
        pool.remove(block)
        return block

    def _map_block(self, block: Block, size: int) -> bool:
        pool = block.pool
        mapped_bytes = round_up(size, pool.segment_bytes)
        if not self._reserve(pool, mapped_bytes):
            return False
        pool.remove(block)
        block.mapped = True
        if mapped_bytes < block.size:
            rest = Block(pool, block.address + mapped_bytes, block.size - mapped_bytes, mapped=False)
            rest.insert_after(block)
            block.size = mapped_bytes
            pool.insert(rest)
        pool.merge(block)
        pool.insert(block)
        return True

    def _unmap_block(self, block: Block) -> None:
        pool = block.pool
        begin = round_up(block.address, pool.segment_bytes)
        end = (block.address + block.size) // pool.segment_bytes * pool.segment_bytes
        if begin >= end:
            return
        pool.remove(block)
        if block.address + block.size > end:
            after = Block(pool, end, block.address + block.size - end)
            after.insert_after(block)
            pool.insert(after)
        if begin > block.address:
            # The front part keeps the `Block` object, so that the link from its previous neighbour stays valid.
            front, block = block, Block(pool, begin, end - begin)
            block.insert_after(front)
            front.size = begin - front.address
            pool.insert(front)
        block.size = end - begin
        block.mapped = False
        pool.merge(block)
        pool.insert(block)
        self.reserved -= end - begin
        if block.whole:
            pool.remove(block)
            self.segments -= 1


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
