"""The arena on the saved activations of a Llama-8B step: memory reserved over memory requested, and time a block.

The trace comes from shapes: 32 layers, width 4096, MLP 14336, 32 query and 8 key/value heads, bfloat16, the tensors
that one block saves for backward. Steps: all blocks leave in forward and come back in backward, where a few are still
being read (their events are late) when the next ones are given back. Beside it what rounding every request up to a
power of two reserves, as PyTorch's pinned allocator and CuPy's pool do. No memory is touched. "First step" and
"steady" are before and after the arena planned its slabs.

    python benchmarks/bench_arena.py [--steps 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from memscale.runtime.storage.arena import Arena, ArenaBlock, page_aligned_memory
from memscale.runtime.storage.tiers import TierUse

LAYERS, WIDTH, MLP, HEADS, KEY_HEADS, HEAD = 32, 4096, 14336, 32, 8, 128
BFLOAT16, FLOAT32 = 2, 4
LAG = 4  # blocks


class Later:
    """An event that is done once so many more blocks were given back."""

    def __init__(self, arrivals: list[int], lag: int) -> None:
        self.arrivals, self.due = arrivals, arrivals[0] + lag

    def done(self) -> bool:
        return self.arrivals[0] >= self.due


def saved_by_a_block(tokens: int, batch: int = 1) -> list[int]:
    """Bytes of the tensors that one Llama block keeps for backward, in the order that forward saves them."""
    rows = tokens * batch
    hidden, inner = rows * WIDTH * BFLOAT16, rows * MLP * BFLOAT16
    norm = [hidden, rows * FLOAT32, hidden]  # the input, its inverse root mean square, the normed input
    keys = rows * KEY_HEADS * HEAD * BFLOAT16
    attention = [rows * HEADS * HEAD * BFLOAT16, keys, keys, hidden, rows * HEADS * FLOAT32]  # ..., output, logsumexp
    return [*norm, *attention, *norm, inner, inner, inner, inner]  # gate, up, silu(gate), and their product


def saved_inputs(tokens: int, batch: int = 1) -> list[int]:
    """What a checkpointed block keeps: its input."""
    return [tokens * batch * WIDTH * BFLOAT16]


class Steps:
    """Forwards that take blocks and backwards that give them back, on one arena."""

    def __init__(self, arena: Arena, layers: list[list[int]]) -> None:
        self.arena, self.layers = arena, layers
        self.arrivals = [0]
        self.seconds: list[float] = []

    def forward(self, sizes: list[int]) -> list[ArenaBlock]:
        blocks = []
        for nbytes in sizes:
            start = time.perf_counter()
            block = self.arena.take(nbytes)
            self.seconds.append(time.perf_counter() - start)
            assert block is not None
            blocks.append(block)
        return blocks

    def backward(self, blocks: list[ArenaBlock]) -> None:
        for block in reversed(blocks):
            self.arena.give(block, after=[Later(self.arrivals, LAG)])
            self.arrivals[0] += 1

    def one_after_another(self, steps: int) -> None:
        for _ in range(steps):
            taken = [self.forward(sizes) for sizes in self.layers]
            for blocks in reversed(taken):
                self.backward(blocks)
            self.arrivals[0] += LAG

    def overlapped(self, steps: int) -> None:
        """The next forward runs while the backward does, as in a pipeline."""
        taken = [self.forward(sizes) for sizes in self.layers]
        for _ in range(steps):
            following = []
            for sizes in self.layers:
                following.append(self.forward(sizes))
                self.backward(taken.pop())
            taken = following
        for blocks in reversed(taken):
            self.backward(blocks)
        self.arrivals[0] += LAG


def power_of_two_waste(sizes: list[int]) -> float:
    return sum(1 << max(0, nbytes - 1).bit_length() for nbytes in sizes) / sum(sizes) - 1


def waste(usage: TierUse) -> float:
    """The share that was reserved beyond what was ever in use at once."""
    return usage.reserved_bytes / usage.high_water_bytes - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--slab-bytes", type=int, default=256 * 1024**2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {LAYERS} layers, slabs of {options.slab_bytes / 2**20:.0f} MiB")
    print(f"{'':30} {'requested':>10} {'power of two':>13} {'first step':>11} {'steady':>8} {'take':>9}")
    for kind, saved in (("activations", saved_by_a_block), ("block inputs", saved_inputs)):
        for tokens, batch in ((4096, 1), (4160, 1), (5000, 1), (8192, 1), (2304, 2)):
            report(f"{kind}, {batch} x {tokens}", [saved(tokens, batch)] * LAYERS, Steps.one_after_another, options)
    report("overlapped, 1 x 4096", [saved_by_a_block(4096)] * LAYERS, Steps.overlapped, options)
    mixed = [saved_by_a_block(4096) if layer % 3 else saved_inputs(4096) for layer in range(LAYERS)]
    report("some checkpointed, overlapped", mixed, Steps.overlapped, options)


def report(title: str, layers: list[list[int]], run: Callable[[Steps, int], None], options: argparse.Namespace) -> None:
    page = page_aligned_memory(1)
    sizes = [nbytes for layer in layers for nbytes in layer]
    # One byte, again and again: the addresses are all that counts here.
    arena = Arena(lambda nbytes: page.expand(nbytes), cap_bytes=4 * sum(sizes), slab_bytes=options.slab_bytes)
    steps = Steps(arena, layers)
    run(steps, 1)
    first = waste(arena.usage())
    arena.replan()
    steps.seconds.clear()
    run(steps, options.steps)
    usage = arena.usage()
    print(
        f"{title:30} {usage.high_water_bytes / 2**30:6.2f} GiB {power_of_two_waste(sizes):12.1%} {first:10.1%} "
        f"{waste(usage):7.2%} {1e6 * statistics.median(steps.seconds):6.1f} µs"
    )


if __name__ == "__main__":
    main()
