"""How fast a process on a CPU gets memory that it did not have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memscale.runtime import HostBackend
from memscale.runtime.storage import PAGE_BYTES

_PIECE_BYTES = 4 * 1024**2
_ROUNDS = 3


def new_memory_rate(nbytes: int, clock: Callable[[], float]) -> dict[str, float]:
    """The bytes a second by the name of the field of `Hardware`; nothing where that cannot be seen.

    What touching each page takes the first time above the second, and giving them back, as a runtime does. Not what
    filling them takes: that is fast on pages that the system has just cleared, and most operators compute longer than
    they write. The best of several rounds.

    Args:
        nbytes: to get.
        clock: seconds since some moment, of this thread if need be.
    """
    pieces = nbytes // _PIECE_BYTES
    backend = HostBackend()
    backend.trim()
    took = [_seconds(backend, pieces, clock) for _ in range(_ROUNDS)]
    if not pieces or min(took) <= 0:
        return {}
    return {"new_memory_bytes_per_second": pieces * _PIECE_BYTES / min(took)}


def _seconds(backend: HostBackend, pieces: int, clock: Callable[[], float]) -> float:
    began = clock()
    tensors = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(pieces)]
    for tensor in tensors:
        tensor[::PAGE_BYTES].fill_(1)
    first = clock()
    for tensor in tensors:
        tensor[::PAGE_BYTES].fill_(2)
    second = clock()
    tensors.clear()
    backend.trim()
    return (first - began) - (second - first) + (clock() - second)
