"""How fast tensors go to disk and come back, moved as offloading moves them, beside a thread that computes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memscale.core import MemscaleError, RuntimeUnavailable
from memscale.runtime import HostBackend
from memscale.runtime.backends import Buffer, Event

# Copies are as large as an engine's, at least so many, and the best of so many rounds counts.
_PIECE_BYTES = 4 * 1024**2
_FEWEST_PIECES = 4
_ROUNDS = 3
# On their way at a time, as many as an engine has by itself.
_IN_FLIGHT = 2
_PRODUCT_SIZE = 384  # a fraction of a millisecond, so that the end of a copy is not missed for long


def disk_rates(nbytes: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """The bytes a second by the names of the fields of `Hardware`; nothing where there is no disk, or no room on it.

    The speed of the disk alone is not what a step sees: the threads that copy share the processor with it. Memory that
    a process has to get first, for what comes back, is apart: see `new_memory_rate`. The best of several rounds: what
    disturbs a disk only ever makes it slower.

    Args:
        nbytes: of the file.
        clock: seconds since some moment.
    """
    pieces = nbytes // _PIECE_BYTES
    if pieces < _FEWEST_PIECES:
        return {}
    took: dict[str, list[float]] = {"write": [], "read": []}
    try:
        with torch.inference_mode():
            for _ in range(_ROUNDS):
                written, read = _there_and_back(pieces, clock)
                took["write"].append(written)
                took["read"].append(read)
    except MemscaleError:
        return {}
    return {f"disk_{name}_bytes_per_second": pieces * _PIECE_BYTES / min(seconds) for name, seconds in took.items()}


def _there_and_back(pieces: int, clock: Callable[[], float]) -> tuple[float, float]:
    """The seconds to write so many tensors, and to read them."""
    backend = HostBackend(threads=_IN_FLIGHT)
    memory = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(_IN_FLIGHT)]
    buffers = [backend.allocate(_PIECE_BYTES, "disk") for _ in range(pieces)]
    generator = torch.Generator("cpu").manual_seed(0)
    for each in memory:  # a disk may compress, and skip what is zero
        each.random_(generator=generator)

    def write(piece: int) -> Event:
        return backend.copy(memory[piece % _IN_FLIGHT], _there(buffers[piece]), "out", after=())

    def read(piece: int) -> Event:
        return backend.copy(_there(buffers[piece]), memory[piece % _IN_FLIGHT], "in", after=())

    return _seconds(write, pieces, clock), _seconds(read, pieces, clock)


def _seconds(start: Callable[[int], Event], pieces: int, clock: Callable[[], float]) -> float:
    """How long so many copies take beside a thread that computes."""
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


def _there(buffer: Buffer | None) -> Buffer:
    if buffer is None:
        raise RuntimeUnavailable("the disk has no room for a file to measure it by")
    return buffer
