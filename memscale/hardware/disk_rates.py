"""Measures how fast tensors move to disk and back, by offloading's own copies, while another thread computes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memscale.core import MemscaleError, RuntimeUnavailable
from memscale.runtime import HostBackend
from memscale.runtime.backends import Buffer, Event

# The size of a copy (as an engine's), the least number of copies, and the number of rounds, of which the best counts.
_PIECE_BYTES = 4 * 1024**2
_FEWEST_PIECES = 4
_ROUNDS = 3
# Copies in flight at a time, the default of an engine.
_IN_FLIGHT = 2
_PRODUCT_SIZE = 384  # short products (below 1 ms), so that the end of a copy is noticed soon


def disk_rates(nbytes: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Measures the disk. Returns bytes a second by the names of the fields of `Hardware`; empty without a usable disk.

    The figures include that copying threads share the processor with the step. They exclude the time to get new memory
    for tensors that come back, which `new_memory_rate` measures. The best of several rounds counts, since disturbances
    only make a disk slower.

    Args:
        nbytes: the size of the file.
        clock: returns seconds.
    """
    pieces = nbytes // _PIECE_BYTES
    if pieces < _FEWEST_PIECES:
        return {}
    took: dict[str, list[float]] = {"write": [], "read": []}
    try:
        with torch.inference_mode():
            for _ in range(_ROUNDS):
                written, read = _round_trip(pieces, clock)
                took["write"].append(written)
                took["read"].append(read)
    except MemscaleError:
        return {}
    return {f"disk_{name}_bytes_per_second": pieces * _PIECE_BYTES / min(seconds) for name, seconds in took.items()}


def _round_trip(pieces: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the seconds to write `pieces` tensors, and to read them."""
    backend = HostBackend(threads=_IN_FLIGHT)
    memory = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(_IN_FLIGHT)]
    buffers = [backend.allocate(_PIECE_BYTES, "disk") for _ in range(pieces)]
    generator = torch.Generator("cpu").manual_seed(0)
    for each in memory:  # random numbers, for a disk may compress or skip zeros
        each.random_(generator=generator)

    def write(piece: int) -> Event:
        return backend.copy(memory[piece % _IN_FLIGHT], _allocated(buffers[piece]), "out", after=())

    def read(piece: int) -> Event:
        return backend.copy(_allocated(buffers[piece]), memory[piece % _IN_FLIGHT], "in", after=())

    return _seconds(write, pieces, clock), _seconds(read, pieces, clock)


def _seconds(start: Callable[[int], Event], pieces: int, clock: Callable[[], float]) -> float:
    """Returns the seconds of `pieces` copies while another thread computes."""
    left, right, out = (torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, device="cpu") for _ in range(3))
    under_way: list[Event] = []
    began = clock()
    for piece in range(pieces + _IN_FLIGHT):
        while len(under_way) == _IN_FLIGHT or (piece >= pieces and under_way):
            torch.mm(left, right, out=out)
            under_way = [event for event in under_way if not _is_done(event)]
        if piece < pieces:
            under_way.append(start(piece))
    return clock() - began


def _is_done(event: Event) -> bool:
    if event.done() and (error := event.error()) is not None:
        raise error
    return event.done()


def _allocated(buffer: Buffer | None) -> Buffer:
    if buffer is None:
        raise RuntimeUnavailable("the disk has no room for a file to measure it by")
    return buffer
