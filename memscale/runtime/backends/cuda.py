"""The backend of CUDA devices. Only this module imports CuPy, and only when a CUDA device is present."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memscale.core import TIERS, RuntimeUnavailable, internals
from memscale.runtime.backends.host_tiers import HostBuffer, HostTiers
from memscale.runtime.backends.protocol import TOGETHER_BYTES, Buffer, Event, Stream, one_behind_the_other
from memscale.runtime.engine.refusals import refuse_in_capture, refuse_in_fork
from memscale.runtime.storage.arena import page_aligned_memory
from memscale.runtime.storage.budget import HostBudget
from memscale.runtime.storage.copy_pool import CopyFuture, CopyPool
from memscale.runtime.storage.disk import Extent
from memscale.runtime.storage.mapping import Bytes
from memscale.runtime.storage.tiers import TierUse

_HERE = contextlib.nullcontext()  # where the backend's device is the current one
_STAGING_BYTES = 8 * 1024**2
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def load_cupy() -> Any:
    """Returns the CuPy module, after a check that it sees a CUDA device as PyTorch does.

    Raises:
        RuntimeUnavailable: there is no CUDA device, or no CuPy for it.
    """
    version = torch.version.cuda
    if version is None or not torch.cuda.is_available():
        found = "this PyTorch is built without CUDA" if version is None else "PyTorch finds no CUDA device"
        raise RuntimeUnavailable(f"offload() of CUDA tensors needs a CUDA device: {found}; use a machine that has one")
    wheel = f"cupy-cuda{version.split('.')[0]}x"
    try:
        import cupy
    except ImportError as error:
        raise RuntimeUnavailable(f"offload() of CUDA tensors needs CuPy ({error}); run: pip install {wheel}") from error
    # Checked before any stream is made: without a device, the destructor of a CuPy stream fails and prints.
    if not cupy.cuda.is_available():
        raise RuntimeUnavailable(
            f"CuPy {cupy.__version__} finds no CUDA device where PyTorch, built for CUDA {version}, does; uninstall "
            f"every cupy package and run: pip install {wheel}"
        )
    return cupy


class CudaEvent:
    """A pair of CUDA events around a copy, or one event in a stream."""

    def __init__(self, backend: CudaBackend, begin: Any, end: Any) -> None:
        self._backend = backend
        self._begin = begin
        self.end = end

    def done(self) -> bool:
        return bool(self.end.done)

    def span(self) -> tuple[float, float] | None:
        if not self.end.done:
            return None
        end = self._backend.seconds_at(self.end)
        return end if self._begin is self.end else self._backend.seconds_at(self._begin), end

    def error(self) -> None:
        return None  # a CUDA error poisons the whole device: the next CUDA call raises it


class _CopyStream:
    """A direction of the link: a CUDA stream, and a thread for copies in which the CPU takes part."""

    def __init__(self, cupy: Any, name: str) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.staging: list[torch.Tensor] = []
        self._copy_pool = CopyPool(1, name)
        self._last: CopyFuture[None] | None = None

    def is_idle(self) -> bool:
        """Whether the thread is idle, so that a copy queued on the stream directly keeps the order."""
        return self._last is None or self._last.done()

    def submit(self, run: Callable[[], None]) -> CopyFuture[None]:
        self._last = self._copy_pool.submit(run)
        return self._last


class CudaBackend:
    """Moves tensors of one CUDA device to pinned memory, pageable memory and disk.

    Copies from and to pinned memory are queued on two copy streams and need no CPU. Copies of the other tiers run in
    one thread per direction, and waiting for such a copy blocks the host. Bytes on their way to disk pass through 16
    MiB of staging memory per direction.

    Args:
        device: the device; None is the current one.
        pinned_bytes: the most bytes that are pinned; None is limited by `budget` alone.
        budget: the RAM that pinned and pageable memory may take together, for all devices that share it; None is the
            RAM that the machine has available.
        disk_bytes: the most bytes on disk; None is all that the disk has.
        disk_directory: the directory of the disk tier's file; None is the first temporary directory that is not in RAM.

    Raises:
        RuntimeUnavailable: there is no CUDA device, no CuPy for it, or no such disk directory.
    """

    tiers: tuple[str, ...] = TIERS
    together_bytes = TOGETHER_BYTES

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        pinned_bytes: int | None,
        budget: HostBudget | None = None,
        disk_bytes: int | None = None,
        disk_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._cupy = load_cupy()
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._runtime = self._cupy.cuda.runtime
        self._raw_stream = internals.named("torch._C._cuda_getCurrentRawStream")
        self._process = os.getpid()
        self._taken_bytes: int | None = None  # bytes ever reserved for large blocks, at the last `trim(if_grown=True)`
        self._pinned: dict[int, torch.Tensor] = {}
        self._tiers = HostTiers(
            self._pin,
            self._unpin,
            pinned_bytes=pinned_bytes,
            budget=budget or HostBudget(None),
            disk_bytes=disk_bytes,
            disk_directory=disk_directory,
        )
        with self._on_device():
            self._copy_streams: dict[str, _CopyStream] = {name: _CopyStream(self._cupy, name) for name in ("out", "in")}
            self._zero = self._recorded(self._copy_streams["out"].stream.ptr)
            self._zero.synchronize()
        self._zero_seconds = time.perf_counter()
        streams = [direction.stream for direction in self._copy_streams.values()]
        end = weakref.finalize(self, _end, self._cupy, self.device.index, self._process, streams, self._pinned)
        end.atexit = False  # at exit the driver may be gone, and unregisters the memory itself

    def allocate(self, nbytes: int, tier: str) -> HostBuffer | None:
        self._refuse_where_impossible()
        return self._tiers.allocate(nbytes, tier)

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        assert isinstance(buffer, HostBuffer)
        self._tiers.free(buffer, after=after)

    def map(self, buffer: Buffer) -> Bytes:
        """See `Backend.map`; `DiskSlab.map` says when `RuntimeUnavailable` is raised."""
        assert isinstance(buffer, HostBuffer)
        return self._tiers.map(buffer)

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(nbytes, dtype=torch.uint8)

    def discard(self, tensor: torch.Tensor) -> None:
        """Does nothing: PyTorch's allocator handles the freed memory."""

    def trim(self, *, if_grown: bool = False) -> None:
        self._refuse_where_impossible()
        if not if_grown:
            torch.cuda.empty_cache()
            return
        # The bytes ever reserved for large blocks. Small blocks have segments of their own, which do not fragment
        # others.
        taken_bytes = torch.cuda.memory_stats(self.device).get("reserved_bytes.large_pool.allocated", 0)
        before_bytes, self._taken_bytes = self._taken_bytes, taken_bytes
        if before_bytes is not None and taken_bytes > before_bytes:
            torch.cuda.empty_cache()

    def lend(self, tensor: torch.Tensor) -> None:
        """Lets PyTorch's allocator wait for the caller's stream too, before it reuses the memory."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def compute_stream(self) -> int:
        """Returns the pointer of the current stream, which is 0 for the default stream of every device.

        It is read at each use, because it changes inside `torch.cuda.stream` and in the threads of backward. PyTorch
        never destroys its streams, and autograd switches back to the stream of the forward, so a pointer may be kept.
        """
        # `torch.cuda.current_stream` would build several Python objects for the same number.
        pointer: int = self._raw_stream(self.device.index)
        return pointer

    def record(self, stream: int | None = None) -> CudaEvent:
        refuse_in_fork(self._process)
        with self._on_device():
            refuse_in_capture()
            event = self._recorded(self.compute_stream() if stream is None else stream)
        return CudaEvent(self, event, event)

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Event:
        out = isinstance(source, torch.Tensor)
        tensor, buffer = (source, target) if out else (target, source)
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(buffer, HostBuffer)
        return self._queued([tensor], buffer, stream, after)

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> Event:
        assert isinstance(buffer, HostBuffer)
        return self._queued(sources, buffer, "out", after)

    def _queued(
        self, tensors: Sequence[torch.Tensor], buffer: HostBuffer, stream: Stream, after: Sequence[Event]
    ) -> CudaEvent | CopyFuture[None]:
        refuse_in_fork(self._process)
        placed = list(one_behind_the_other(tensors))
        nbytes = placed[-1][0] + placed[-1][1].nbytes
        assert nbytes == buffer.nbytes, f"a copy of {nbytes} bytes and a buffer of {buffer.nbytes}"
        direction, out = self._copy_streams[stream], stream == "out"
        # The block's memory is looked up now. A block freed before a queued copy has run is reused only after the copy.
        room = buffer.room if isinstance(buffer.room, Extent) else buffer.room.tensor
        is_ordered = all(event.done() for event in after if not isinstance(event, CudaEvent))
        if buffer.tier != "pinned" or not direction.is_idle() or not is_ordered:
            return direction.submit(lambda: self._carry(direction, placed, room, after, out=out))
        assert not isinstance(room, Extent)
        with self._on_device():
            refuse_in_capture()
            self._order(direction, after)
            return self._move(direction, _pairs(placed, room), out=out)

    def wait(self, event: Event, stream: int | None = None) -> None:
        """Makes a compute stream wait for `event`; blocks the host only if the CPU takes part in the copy."""
        if isinstance(event, CudaEvent):
            with self._on_device():
                self._runtime.streamWaitEvent(self.compute_stream() if stream is None else stream, event.end.ptr)
        else:
            assert isinstance(event, CopyFuture)
            event.wait()

    def synchronize(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            event.end.synchronize()
        else:
            assert isinstance(event, CopyFuture)
            event.wait()

    def clock(self) -> float:
        return time.perf_counter()

    def seconds_at(self, event: Any) -> float:
        """Returns when a finished CuPy event was reached, in seconds of `clock`."""
        milliseconds: float = self._cupy.cuda.get_elapsed_time(self._zero, event)
        return self._zero_seconds + milliseconds / 1e3

    def usage(self) -> Mapping[str, TierUse]:
        return self._tiers.usage()

    # ------------------------------------------------------------------------------------------------- copies

    def _on_device(self) -> Any:
        # New events, stream 0 and PyTorch's current stream belong to the current device, of which each thread has its
        # own.
        if torch.cuda.current_device() == self.device.index:
            return _HERE
        return self._cupy.cuda.Device(self.device.index)

    def _recorded(self, pointer: int) -> Any:
        event = self._cupy.cuda.Event(block=True)
        self._runtime.eventRecord(event.ptr, pointer)
        return event

    def _order(self, direction: _CopyStream, after: Sequence[Event]) -> None:
        for event in after:
            if isinstance(event, CudaEvent):
                self._runtime.streamWaitEvent(direction.stream.ptr, event.end.ptr)
            else:
                assert isinstance(event, CopyFuture)
                event.wait()

    def _move(self, direction: _CopyStream, pairs: Sequence[_Pair], *, out: bool) -> CudaEvent:
        pointer, copy = direction.stream.ptr, self._runtime.memcpyAsync
        begin = self._recorded(pointer)
        for on_device, on_host, nbytes in pairs:
            if out:
                copy(on_host, on_device, nbytes, self._runtime.memcpyDeviceToHost, pointer)
            else:
                copy(on_device, on_host, nbytes, self._runtime.memcpyHostToDevice, pointer)
        return CudaEvent(self, begin, self._recorded(pointer))

    def _carry(
        self,
        direction: _CopyStream,
        placed: Sequence[tuple[int, torch.Tensor]],
        room: torch.Tensor | Extent,
        after: Sequence[Event],
        *,
        out: bool,
    ) -> None:
        """Copies with the CPU's help, in the direction's thread; returns when the copy is done."""
        with self._on_device():
            self._order(direction, after)
            if not isinstance(room, Extent):
                self._move(direction, _pairs(placed, room), out=out).end.synchronize()
            elif out:
                self._carry_to_disk(direction, placed, room)
            else:
                self._carry_from_disk(direction, placed[0][1], room)

    def _carry_to_disk(
        self, direction: _CopyStream, placed: Sequence[tuple[int, torch.Tensor]], extent: Extent
    ) -> None:
        """Copies piece by piece: one piece is on the link while the previous one is written. Several fit in a piece."""
        writes: list[CopyFuture[Extent]] = []
        try:
            for piece, at in self._pieces(direction, extent.nbytes):
                if len(writes) > 1:
                    writes[-2].result()  # the write from the same half of the staging memory
                pairs = [_pair(placed[0][1], piece, at)] if len(placed) == 1 else _pairs(placed, piece)
                self._move(direction, pairs, out=True).end.synchronize()
                writes.append(self._tiers.disk.write(piece, extent, at=at))
        finally:
            for write in writes:
                write.exception()  # waits until the write no longer reads the staging memory, even if it failed
        for write in writes:
            write.result()

    def _carry_from_disk(self, direction: _CopyStream, tensor: torch.Tensor, extent: Extent) -> None:
        """Copies piece by piece: one piece is on the link while the next one is read."""
        pieces = self._pieces(direction, tensor.nbytes)
        reads = [(piece, at, self._tiers.disk.read(extent, piece, at=at)) for piece, at in pieces[:1]]
        try:
            for index in range(len(pieces)):
                piece, at, read = reads[index]
                read.result()
                reads += [(p, a, self._tiers.disk.read(extent, p, at=a)) for p, a in pieces[index + 1 : index + 2]]
                self._move(direction, [_pair(tensor, piece, at)], out=False).end.synchronize()
        finally:
            for _, _, read in reads:
                read.exception()

    def _pieces(self, direction: _CopyStream, nbytes: int) -> list[tuple[torch.Tensor, int]]:
        """Returns, for each piece of `nbytes`, one of the two halves of the staging memory and its first byte."""
        if not direction.staging:
            direction.staging = [page_aligned_memory(_STAGING_BYTES) for _ in range(2)]
            for half in direction.staging:
                with contextlib.suppress(MemoryError):  # unpinned staging memory works too, more slowly
                    self._pin(half)
        starts = range(0, nbytes, _STAGING_BYTES)
        return [
            (direction.staging[index % 2][: min(_STAGING_BYTES, nbytes - at)], at) for index, at in enumerate(starts)
        ]

    # ------------------------------------------------------------------------------------------- pinned memory

    def _pin(self, slab: torch.Tensor) -> None:
        with self._on_device():
            try:
                self._runtime.hostRegister(slab.data_ptr(), slab.nbytes, _PORTABLE)
            except self._runtime.CUDARuntimeError as error:
                raise MemoryError(f"CUDA pins no {slab.nbytes} bytes more: {error}") from error
        self._pinned[slab.data_ptr()] = slab

    def _unpin(self, slab: torch.Tensor) -> None:
        del self._pinned[slab.data_ptr()]
        with self._on_device():
            self._runtime.hostUnregister(slab.data_ptr())

    def _refuse_where_impossible(self) -> None:
        refuse_in_fork(self._process)
        with self._on_device():
            refuse_in_capture()


_Pair = tuple[int, int, int]  # addresses on the device and on the host, and the bytes to copy


def _pair(tensor: torch.Tensor, memory: torch.Tensor, at: int) -> _Pair:
    """Returns the copy of `memory` from byte `at` of `tensor` on, or to there."""
    return tensor.data_ptr() + at, memory.data_ptr(), memory.nbytes


def _pairs(placed: Sequence[tuple[int, torch.Tensor]], memory: torch.Tensor) -> list[_Pair]:
    """Returns the copies of tensors that are in `memory`, each from its byte on."""
    address = memory.data_ptr()
    return [(tensor.data_ptr(), address + start, tensor.nbytes) for start, tensor in placed]


def _end(cupy: Any, device: int, process: int, streams: Sequence[Any], pinned: Mapping[int, torch.Tensor]) -> None:
    """Unregisters the memory that is still pinned, after all copies have ended."""
    if os.getpid() != process:  # CUDA does not work in a forked process
        return
    with cupy.cuda.Device(device):
        for stream in streams:
            stream.synchronize()
        for pointer in pinned:
            cupy.cuda.runtime.hostUnregister(pointer)
