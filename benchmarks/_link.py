"""The link: copies of our backend against plain ones of PyTorch's, many of a size, one after another.

A pass moves the same bytes in copies of the size that is measured, queued as fast as the caller can. Its time is that
of the caller's clock, from the first copy to the arrival of the last, so what a copy costs the caller counts as far as
the link does not hide it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from memscale.runtime.backends.cuda import CudaBackend
from memscale.runtime.backends.host import HostBackend
from memscale.runtime.backends.protocol import Backend, Event, Stream

MIB = 1024**2
DIRECTIONS: dict[str, tuple[Stream, ...]] = {"out": ("out",), "in": ("in",), "each of both": ("out", "in")}


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast one contender moves copies of one size; "each of both" is one direction while the other is busy too."""

    contender: str
    direction: str
    copy_bytes: int
    bytes_per_second: float
    caller_seconds: float
    """What queueing one copy takes the caller."""


class Copies:
    """Memory for one pass in each direction, and how to move it."""

    def __init__(self, device: str, copy_bytes: int, pass_bytes: int) -> None:
        self.copy_bytes = copy_bytes
        self.count = max(1, pass_bytes // copy_bytes)
        whole = {way: torch.empty(self.count * copy_bytes, dtype=torch.uint8, device=device) for way in ("out", "in")}
        self.tensors = {way: tensor.random_(256).split(copy_bytes) for way, tensor in whole.items()}

    def queue(self, way: Stream, index: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def timed(self, direction: str) -> tuple[float, float]:
        """The rate of one pass in bytes a second for each way, and the caller's seconds for a copy."""
        ways = DIRECTIONS[direction]
        self.finish()
        start = time.perf_counter()
        for index in range(self.count):
            for way in ways:
                self.queue(way, index)
        queued = time.perf_counter()
        self.finish()
        stop = time.perf_counter()
        return self.count * self.copy_bytes / (stop - start), (queued - start) / (self.count * len(ways))


class Ours(Copies):
    """Through the backend, asked as the engine asks it."""

    def __init__(self, backend: Backend, device: str, copy_bytes: int, pass_bytes: int) -> None:
        super().__init__(device, copy_bytes, pass_bytes)
        self.backend = backend
        self.is_cuda = device == "cuda"
        self.events: list[Event] = []
        self.buffers = {way: [backend.allocate(copy_bytes, "auto") for _ in self.tensors[way]] for way in self.tensors}
        for buffer in (buffer for buffers in self.buffers.values() for buffer in buffers):
            assert buffer is not None
            assert buffer.tier == backend.tiers[0], f"{buffer.tier} is not what is compared"

    def queue(self, way: Stream, index: int) -> None:
        tensor, buffer = self.tensors[way][index], self.buffers[way][index]
        assert buffer is not None
        after = [self.backend.record()]
        source, target = (tensor, buffer) if way == "out" else (buffer, tensor)
        self.events.append(self.backend.copy(source, target, way, after=after))

    def finish(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        for event in self.events:
            if not event.done():
                self.backend.wait(event)
        self.events.clear()

    def close(self) -> None:
        for buffers in self.buffers.values():
            for buffer in buffers:
                assert buffer is not None
                self.backend.free(buffer, after=[])


class Plain(Copies):
    """`cudaMemcpyAsync` between the device and pinned memory of PyTorch's."""

    def __init__(self, copy_bytes: int, pass_bytes: int) -> None:
        super().__init__("cuda", copy_bytes, pass_bytes)
        self.pinned = {
            way: torch.empty(self.count * copy_bytes, dtype=torch.uint8, pin_memory=True).split(copy_bytes)
            for way in self.tensors
        }
        self.streams = {way: torch.cuda.Stream() for way in self.tensors}

    def queue(self, way: Stream, index: int) -> None:
        source, target = self.tensors[way][index], self.pinned[way][index]
        if way == "in":
            source, target = target, source
        with torch.cuda.stream(self.streams[way]):
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        torch.cuda.synchronize()


def new_backend(device: str, pass_bytes: int, directory: str | None) -> Backend:
    if device == "cuda":
        return CudaBackend(pinned_bytes=2 * pass_bytes, disk_bytes=0)
    return HostBackend(directory)


def measure_link(
    device: str, sizes: tuple[int, ...], rounds: int, directory: str | None = None, pass_bytes: int = 256 * MIB
) -> list[Rate]:
    """Medians of interleaved rounds. On a CPU, where the link is a disk, nothing plain stands beside ours."""
    pass_bytes = max(pass_bytes, *sizes)
    backend = new_backend(device, pass_bytes, directory)
    found = []
    for size in sizes:
        ours = Ours(backend, device, size, pass_bytes)
        contenders: dict[str, Copies] = {"memscale": ours}
        if device == "cuda":
            contenders["plain"] = Plain(size, pass_bytes)
        timed: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(rounds + 1):
            for direction in DIRECTIONS:
                for name, copies in contenders.items():
                    taken = copies.timed(direction)
                    if turn:  # the first touches memory and makes events
                        timed.setdefault((name, direction), []).append(taken)
        for (name, direction), values in timed.items():
            rate, caller_seconds = (statistics.median(column) for column in zip(*values, strict=True))
            found.append(Rate(name, direction, size, rate, caller_seconds))
        ours.close()
    return found


def rate_of(rates: list[Rate], contender: str, direction: str, copy_bytes: int) -> Rate:
    return next(
        rate
        for rate in rates
        if (rate.contender, rate.direction, rate.copy_bytes) == (contender, direction, copy_bytes)
    )
