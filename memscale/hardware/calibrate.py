"""Measures the speed of a device and of its disk: the largest rates that matrix products and copies reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import MemscaleError, RuntimeUnavailable
from memscale.runtime import AsyncOffloadConfig, HostBackend
from memscale.runtime.backends import Buffer, Event

Clock = Callable[[], float]
Run = Callable[[], object]

# Rows of the square matrices; the largest fills a card. A CPU's rates by fewer: benchmarks/bench_clock.py.
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
# Bytes of each of three buffers that are copied in rotation, so that no cache holds a buffer until its next copy.
# Assumed: a cache has less than two of them.
_COPY_BYTES = 128 * 1024**2
# Launches, by choice: both together do not fill CUDA's queue (1,024 in `simulation/schedule/clock.py`).
_TINY_OPS, _COPIES_AHEAD = 500, 200
# Seconds, so that no measured time is 0. Assumed: less than any kernel takes.
_LEAST_SECONDS = 1e-7
# Runs of each measurement; the spread of the rates with fewer: benchmarks/bench_clock.py.
_REPEATS = 3

_DTYPES = {
    "cpu": ("float64", "float32", "bfloat16", "float16", "int8"),
    "cuda": ("float64", "float32", "tfloat32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
}


def calibrate(
    device: torch.device,
    free_bytes: int | None,
    *,
    sizes: tuple[int, ...] = _SIZES,
    copy_bytes: int = _COPY_BYTES,
    budget_seconds: float = 1.5,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Returns the measured speeds of `device`, by the names of the fields of `Hardware`.

    Each speed is the best of several medians: one interruption does not change a median, and disturbances only make a
    machine slower.

    Args:
        device: a CPU or CUDA device.
        free_bytes: its free memory; the measurement takes at most a quarter of it.
        sizes: the rows of the square matrices, growing. A size that would exceed its dtype's share of `budget_seconds`
            is skipped.
        copy_bytes: the bytes of each of the three buffers of the copies.
        budget_seconds: the limit for all matrix products together. The copies take a second more.
        clock: returns seconds. `None` is wall time, or this thread's time if no other thread computes, which leaves
            out other programs.
    """
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    room_bytes = (free_bytes if free_bytes is not None else 4 * 1024**3) // 4
    timer = _Timer(device, clock or (time.thread_time if is_alone else time.perf_counter))
    dtypes = _DTYPES[device.type]
    flops_per_second = {}
    with torch.inference_mode():
        for dtype in dtypes:
            rate = _gemm_rate(dtype, timer, sizes, room_bytes, budget_seconds / len(dtypes))
            if rate is not None:
                flops_per_second[dtype] = rate
        speeds = _copy_rates(timer, min(copy_bytes, room_bytes // 3))
        launch_seconds = _launch_seconds(timer, min(copy_bytes, room_bytes // 3))
    return {
        "flops_per_second": flops_per_second,
        "launch_seconds": launch_seconds,
        **speeds,
        **disk_rates(min(copy_bytes, room_bytes) // 2),
    }


class _Timer:
    """Times runs on one device, which finishes its work before the clock is read."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device = device
        self.clock = clock

    def once(self, run: Run) -> float:
        self._finish()
        began = self.clock()
        run()
        self._finish()
        return self.clock() - began

    def median(self, run: Run) -> float:
        return statistics.median(self.once(run) for _ in range(_REPEATS))

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _gemm_rate(
    dtype: str, timer: _Timer, sizes: tuple[int, ...], room_bytes: int, budget_seconds: float
) -> float | None:
    """Returns the largest operations a second over the sizes, or `None` if the device has no product of this dtype."""
    best: float | None = None
    spent = 0.0
    for size in sizes:
        if 3 * 8 * size * size > room_bytes:
            break
        try:
            with _product(dtype, size, timer.device) as run:
                spent += timer.once(run)  # loads kernels, wakes the device
                seconds = timer.median(run)
        except RuntimeError:  # the device lacks the dtype, or the memory for this size
            break
        spent += _REPEATS * seconds
        best = max(best or 0.0, 2 * size**3 / seconds)
        if spent + 8 * (1 + _REPEATS) * seconds > budget_seconds:  # the next size has at least 8 times the work
            break
    return best


@contextmanager
def _product(dtype: str, size: int, device: torch.device) -> Iterator[Run]:
    """Gives a function that multiplies two `size` × `size` matrices.

    The matrices are random, from a generator of their own: a device under a power limit multiplies constants faster
    than weights (He, "Matrix multiplications on GPUs run faster when given predictable data", 2024).
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=torch.float32) for _ in range(2))
    if dtype == "int8":
        left, right = (matrix.mul(32).clamp(-127, 127).to(torch.int8) for matrix in (left, right))
        yield lambda: torch._int_mm(left, right)
    elif dtype == "float8_e4m3fn":
        left, right = (
            left.to(torch.float8_e4m3fn),
            right.to(torch.float8_e4m3fn).t(),
        )  # cuBLAS requires a column-major right operand
        one = torch.ones((), device=device)
        yield lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        with _tfloat32(dtype == "tfloat32"):
            precision = torch.float32 if dtype == "tfloat32" else getattr(torch, dtype)
            left, right = left.to(precision), right.to(precision)
            out = torch.empty_like(left)
            yield lambda: torch.mm(left, right, out=out)


@contextmanager
def _tfloat32(allowed: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _copy_rates(timer: _Timer, nbytes: int) -> dict[str, float]:
    count = max(1, nbytes // 4)
    # Ones instead of zeros: fresh zeros all map to one page of the system, which reads too fast.
    a, b, c = (torch.ones(count, device=timer.device, dtype=torch.float32) for _ in range(3))
    copy, triad = timer.median(lambda: a.copy_(b)), timer.median(lambda: torch.add(b, c, alpha=3.0, out=a))
    if timer.device.type == "cuda":
        host = torch.ones(count, device="cpu", dtype=torch.float32, pin_memory=True)
        to_device, to_host = timer.median(lambda: a.copy_(host)), timer.median(lambda: host.copy_(a))
        other = torch.ones_like(host)
        of_host = {"host_bandwidth_bytes_per_second": 3 * host.nbytes / timer.median(lambda: other.add_(host))}
    else:
        to_device = to_host = copy
        of_host = {}
    return {
        "bandwidth_bytes_per_second": max(2 * a.nbytes / copy, 3 * a.nbytes / triad),
        "host_to_device_bytes_per_second": a.nbytes / to_device,
        "device_to_host_bytes_per_second": a.nbytes / to_host,
        **of_host,
    }


def _launch_seconds(timer: _Timer, nbytes: int) -> float:
    one = torch.ones(1, device=timer.device)

    def run() -> None:
        for _ in range(_TINY_OPS):
            one.add_(1)

    if timer.device.type != "cuda":
        return timer.median(run) / _TINY_OPS
    # The card's own clock measures the operators. Copies ahead of them keep the card busy until the host, which is
    # slower, has queued all of them.
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a, b = (torch.ones(nbytes // 4, device=timer.device, dtype=torch.float32) for _ in range(2))
    for _ in range(_COPIES_AHEAD):
        a.copy_(b)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(timer.device)
    return max(_LEAST_SECONDS, float(begin.elapsed_time(end)) / 1e3 / _TINY_OPS)


# Bytes of a copy, as of a saved activation; rates by size: benchmarks/bench_disk.py.
_PIECE_BYTES = 4 * 1024**2
# Rows of the products meanwhile: below 1 ms, so that the end of a copy is noticed soon; benchmarks/bench_clock.py
# --offload shows the waits that the rates predict.
_PRODUCT_SIZE = 384
_IN_FLIGHT = AsyncOffloadConfig().streams


def disk_rates(nbytes: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Returns the measured bytes a second of the disk, by the fields of `Hardware`; empty without a usable disk.

    The figures include that copying threads share the processor with the step. The best of several rounds counts,
    since disturbances only make a disk slower.

    Args:
        nbytes: the size of the file.
        clock: returns seconds.
    """
    pieces = nbytes // _PIECE_BYTES
    if pieces < 2 * _IN_FLIGHT:  # too few to overlap
        return {}
    took: dict[str, list[float]] = {"write": [], "read": []}
    try:
        with torch.inference_mode():
            for _ in range(_REPEATS):
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
