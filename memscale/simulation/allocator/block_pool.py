"""The free memory of the simulated CUDA allocator: blocks linked within their segment, sorted within their pool."""

from __future__ import annotations

from bisect import bisect_left, insort

ADDRESS_BITS = 60


class Block:
    """A range of addresses in one segment; ``mapped`` is false where the range has no device memory behind it."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.free = not mapped
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether the block is its whole segment, so that the segment can be given back to the device."""
        return self.prev is None and self.next is None

    def insert_after(self, before: Block) -> None:
        self.prev, self.next = before, before.next
        before.next = self
        if self.next is not None:
            self.next.prev = self


class Pool:
    """The free blocks of one pool: mapped blocks in best-fit order (size, then address), unmapped ones by address."""

    __slots__ = ("blocks", "keys", "segment_bytes", "small", "unmapped", "unmapped_at")

    def __init__(self, *, small: bool, segment_bytes: int) -> None:
        self.small = small
        self.segment_bytes = segment_bytes
        # One integer a block, the size in the bits above the address: (size, address) tuples compare more slowly.
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped_at: list[int] = []
        self.unmapped: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        block.free = True
        if block.mapped:
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
        """Merges ``block`` with its free neighbours, as ``try_merge_blocks`` does; ``block`` itself is not inserted."""
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
    """Returns the smallest multiple of ``step`` that is at least ``nbytes``."""
    return -(-nbytes // step) * step
