"""Free memory of the simulated CUDA allocator: blocks linked within their segment, sorted within their pool."""

from __future__ import annotations

from bisect import bisect_left, insort

ADDRESS_BITS = 60


class Block:
    """A stretch of one segment; ``mapped`` is false for address space without memory behind it."""

    __slots__ = ("address", "born", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.free = not mapped
        self.born = 0  # the pool's count of searches when it became free: its age for garbage collection
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment, so that the segment can be given back."""
        return self.prev is None and self.next is None

    def insert_after(self, before: Block) -> None:
        self.prev, self.next = before, before.next
        before.next = self
        if self.next is not None:
            self.next.prev = self


class Pool:
    """The free blocks of one pool in best-fit order, by size and then address, and the unmapped ones by address."""

    __slots__ = ("blocks", "keys", "searches", "segment_bytes", "small", "unmapped", "unmapped_at")

    def __init__(self, *, small: bool, segment_bytes: int) -> None:
        self.small = small
        self.segment_bytes = segment_bytes
        # One integer a block, with the size above the address: tuples are twice as slow to compare.
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped_at: list[int] = []
        self.unmapped: dict[int, Block] = {}
        self.searches = 0

    def insert(self, block: Block) -> None:
        block.free = True
        if block.mapped:
            block.born = self.searches
            key = block.size << ADDRESS_BITS | block.address
            insort(self.keys, key)
            self.blocks[key] = block
        else:
            insort(self.unmapped_at, block.address)
            self.unmapped[block.address] = block

    def remove(self, block: Block) -> None:
        block.free = False
        if block.mapped:
            key = block.size << ADDRESS_BITS | block.address
            del self.keys[bisect_left(self.keys, key)]
            del self.blocks[key]
        else:
            del self.unmapped_at[bisect_left(self.unmapped_at, block.address)]
            del self.unmapped[block.address]

    def merge(self, block: Block) -> None:
        """``try_merge_blocks`` with both neighbours; ``block`` itself is in no set at this time."""
        before, after = block.prev, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            self.remove(before)
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if block.prev is not None:
                block.prev.next = block
        if after is not None and after.free and after.mapped == block.mapped:
            self.remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.prev = block


def round_up(nbytes: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``nbytes``."""
    return -(-nbytes // step) * step
