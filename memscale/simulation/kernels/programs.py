"""The words in which it is said what a CUDA kernel does with the allocator while it runs, in order.

The order counts: PyTorch's allocator gives a request the best of its free blocks, so which blocks a step needs depends
on what is free at each moment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from memscale.simulation.allocator.block_pool import round_up
from memscale.simulation.allocator.settings import MIN_BLOCK_BYTES

Capability = tuple[int, int]
#: In place of that of CUDA's autocast, for tensors that stand for a card's: of a device that no build of PyTorch has.
AUTOCAST: torch._C.DispatchKey = getattr(torch._C.DispatchKey, "AutocastIPU")  # noqa: B009  # not in PyTorch's stubs


class Result(NamedTuple):
    """One of what a kernel returns, by its place there, where it takes them one at a time."""

    place: int


#: Bytes that a kernel takes, minus the bytes of the block that it gives back (the last one of that size), and
#: :data:`RESULTS` where it takes what it returns and does not have yet, or :class:`Result` for one of it. What is left
#: at the end goes back, the last block first.
Program = tuple[int | Result, ...]
RESULTS = 0
PLAIN: Program = (RESULTS,)


def most_held(program: Program) -> int:
    """The most bytes that a kernel holds at once beside what it returns, as the allocator counts them.

    >>> most_held((RESULTS, 1024, 100, -100, 2000))
    3072
    """
    held = most = 0
    for nbytes in program:
        if isinstance(nbytes, Result):
            continue
        held += round_up(nbytes, MIN_BLOCK_BYTES) if nbytes > 0 else -round_up(-nbytes, MIN_BLOCK_BYTES)
        most = max(most, held)
    return most


def taken(*nbytes: int) -> tuple[int, ...]:
    """What is there to take of these: nothing takes no bytes."""
    return tuple(size for size in nbytes if size)


def briefly(*nbytes: int) -> tuple[int, ...]:
    """These taken, and given back.

    >>> briefly(512, 0, 1024)
    (512, 1024, -1024, -512)
    """
    found = taken(*nbytes)
    return *found, *(-size for size in reversed(found))


def copied(tensor: torch.Tensor) -> int:
    """What ``contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.itemsize


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def has_channels_last(tensor: torch.Tensor) -> bool:
    """``suggest_memory_format``, of a tensor that is whole."""
    kept = CHANNELS_LAST.get(tensor.dim())
    return kept is not None and tensor.is_contiguous(memory_format=kept) and not tensor.is_contiguous()


def is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
