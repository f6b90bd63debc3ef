"""The tiers below the device in a simulated step: runtimes, and the shards of FSDP2 under `CPUOffloadPolicy`.

Each counting runtime records the copies and the bytes of a real runtime without moving any bytes; its backend reports
the times at which the copies would end.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import format_bytes
from memscale.hardware import Direction, assumed_speeds, knows_copies
from memscale.runtime import HostParameter, HostParameters, Runtime
from memscale.runtime.backends import (
    TOGETHER_BYTES,
    Backend,
    Buffer,
    CountedBuffer,
    Event,
    Stream,
    TraceBackend,
    Trims,
    one_behind_the_other,
)
from memscale.runtime.engine import Engine
from memscale.runtime.parameters import MappedTensors, is_movable
from memscale.simulation.dispatch.fake_mode import FakeMode
from memscale.simulation.dispatch.lazy_values import LazyValue, TooLarge, value_of
from memscale.simulation.dispatch.live_storages import LiveStorages, is_small
from memscale.simulation.dispatch.step_values import guess_of
from memscale.simulation.dispatch.trace_builder import StorageRecord, TraceBuilder
from memscale.simulation.process.process_state import patched
from memscale.simulation.schedule.clock import Clock


class CountingRuntimes:
    """The counting runtimes of a simulation: one in place of each runtime that the step uses.

    Args:
        mode: the dispatch mode of the step. (The simulation, which holds the caller's model, would make a cycle.)
        clock: the clock of the simulated device.
        aliases: address of a storage -> the number of references that the simulation holds.

    Attributes:
        by_storage: address of a storage -> the host parameter, for storages on another tier in the simulation.
    """

    def __init__(self, mode: FakeMode, clock: Clock, aliases: Counter[int]) -> None:
        self.mode = mode
        self.clock = clock
        self.aliases = aliases
        self.carried = CarriedValues(mode.storages)
        self.by_storage: dict[int, HostParameter] = {}
        self.engines: list[Engine] = []
        self._made: dict[Runtime, CountingRuntime] = {}

    def high_water_bytes(self) -> dict[str, int]:
        """Returns tier -> the most bytes that the tier held, without empty tiers."""
        found: dict[str, int] = {}
        for engine in self.engines:
            for tier, nbytes in engine.stats().high_water_bytes.items():
                found[tier] = found.get(tier, 0) + nbytes
        return {tier: nbytes for tier, nbytes in found.items() if nbytes}

    def notes(self) -> list[str]:
        """Returns notes on offloads that went to another tier than planned, and on assumed speeds of the host."""
        found = [note for runtime in self._made.values() for note in (*runtime.notes, *runtime.spills())]
        hardware, disk = self.clock.hardware, any(transfer.tier == "disk" for transfer in self.clock.transfers)
        if (disk or self.clock.on_host) and (
            assumed := assumed_speeds(hardware, disk=disk, host=bool(self.clock.on_host))
        ):
            found.append(f"{hardware.name} does not say {assumed}; Hardware.measure() there finds out")
        return found

    def in_place_of(self, runtime: Runtime) -> Runtime:
        """Returns the counting runtime in place of `runtime`."""
        if runtime not in self._made:
            self._made[runtime] = CountingRuntime(runtime, self)
        return self._made[runtime]


class CountingRuntime(Runtime):
    """A runtime with the caps of a real runtime, for tensors without values."""

    def __init__(self, real: Runtime, step: CountingRuntimes) -> None:
        super().__init__(real.config)
        self._real = real
        self._step = step
        self._backends: list[TraceBackend] = []
        self.notes: list[str] = []

    def warn(self, what: str) -> None:
        """Adds the message to the notes, in place of `Runtime.warn`."""
        self.notes.append(what)

    @property
    def by_storage(self) -> dict[int, HostParameter]:
        return self._step.by_storage

    def _new_backend(self, tensor: torch.Tensor) -> TraceBackend:
        hardware = self._step.clock.hardware
        caps = self._real.caps(hardware.device_type, ram_bytes=hardware.host_memory_bytes)
        known = knows_copies(hardware)
        together_bytes = TOGETHER_BYTES if hardware.device_type == "cuda" else 0
        backend = (
            ClockedBackend(caps, self._step.clock, together_bytes=together_bytes)
            if known
            else TraceBackend(caps, together_bytes=together_bytes)
        )
        backend.on_trim, backend.on_copy = self._step.mode.builder.trim, self._step.carried.copied
        self._backends.append(backend)
        return backend

    def spills(self) -> Iterator[str]:
        """Yields a note for each tier that received bytes because a tier above it was full, with the reason."""
        for backend in self._backends:
            for tier, nbytes in backend.spilled_bytes.items():
                yield f"{format_bytes(nbytes)} of what moves lies on {tier} at most, since {self._limit(tier)}"

    def _limit(self, tier: str) -> str:
        pool, host = self._real.config.pool_bytes, self._real.host_bytes
        ram = self._step.clock.hardware.host_memory_bytes
        if tier == "pageable" and pool is not None:
            return f"AsyncOffloadConfig(pool_bytes={pool}) is {format_bytes(pool)} of pinned memory"
        if host is not None and (ram is None or host < ram):
            return f"it may take {format_bytes(host)} of the host's RAM (max_cpu_offload_gb, Runtime(host_bytes=))"
        return f"the host has {format_bytes(ram or 0)} of RAM"

    def _new_engine(self, tensor: torch.Tensor) -> Engine:
        engine = super()._new_engine(tensor)
        self._step.engines.append(engine)
        return engine

    def _new_mover(self, engine: Engine) -> HostParameters:
        return _FakeHostParameters(engine, self._step)


class _FakeHostParameters(HostParameters):
    """Host parameters with sizes and without values."""

    def __init__(self, engine: Engine, step: CountingRuntimes) -> None:
        self._step = step
        super().__init__(engine, step.by_storage)

    def new_memory(self) -> MappedTensors:
        return _FakeMemory(self.engine, self._step.mode)

    def is_movable(self, parameter: torch.Tensor) -> bool:
        return is_movable(parameter, besides=lambda storage: self._step.aliases[storage._cdata])


class _FakeMemory(MappedTensors):
    def __init__(self, engine: Engine, mode: FakeMode) -> None:
        super().__init__(engine)
        self._mode = mode

    def tensor_over(self, buffer: Buffer, backend: Backend) -> torch.Tensor:
        fakes, nbytes = self._mode.fakes, buffer.nbytes
        with _disable_current_modes():  # the step records no operator for this tensor
            tensor = fakes.tensor(fakes.storage(nbytes), torch.uint8, (nbytes,), (1,))
        self._mode.storages.enter_offloaded(tensor)
        return tensor


@dataclass(frozen=True)
class _Left:
    """The state of an offloaded storage's values: `guess` and `later` of its `StorageRecord`, and any real values."""

    guess: str
    later: LazyValue | None
    values: torch.Tensor | None


class CarriedValues:
    """The values of tensors that a real runtime would move; the counting runtimes move no bytes.

    Without these values a fetched tensor would be arbitrary, and a step that reads the tensor (an index, a mask, the
    number of an expert) would take another path in each simulation.
    """

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages
        self._left: weakref.WeakKeyDictionary[Buffer, _Left] = weakref.WeakKeyDictionary()

    def copied(self, source: torch.Tensor | Buffer | Sequence[torch.Tensor], target: torch.Tensor | Buffer) -> None:
        """Copies values from `source` to `target`: from one or several tensors to a buffer, or from a buffer back."""
        if isinstance(target, torch.Tensor):
            assert not isinstance(source, (torch.Tensor, Sequence))
            self._come_back(source, target)
        elif isinstance(source, torch.Tensor):
            self._leave(source, target)
        else:
            assert isinstance(source, Sequence)
            self._leave_together(source, target)

    def _leave(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        record = self._storages.record(tensor)
        whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        values = None
        if record.known and record.later is None and is_small(tensor):
            with _disable_current_modes():
                values = tensor.clone()
        self._left[buffer] = _Left(record.guess, record.later if whole else None, values)

    def _leave_together(self, tensors: Sequence[torch.Tensor], buffer: Buffer) -> None:
        """Carries the values of integer and bool tensors; code of a backward does not branch on other values."""
        records = [self._storages.record(tensor) for tensor in tensors]
        if any(getattr(torch, record.dtype).is_floating_point for record in records):
            return
        values = torch.zeros(buffer.nbytes, dtype=torch.uint8)
        are_known = False
        with _disable_current_modes(), torch.no_grad():
            for (start, tensor), record in zip(one_behind_the_other(tensors), records, strict=True):
                found = None if record.later is None and not record.known else tensor
                if record.later is not None:
                    with suppress(TooLarge):
                        found = value_of(tensor, record.later)
                if found is not None:
                    values[start : start + tensor.nbytes].copy_(found.reshape(-1).view(torch.uint8))
                    are_known = True
        if are_known:
            self._left[buffer] = _Left(guess_of(records), None, values)

    def _come_back(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        record = self._storages.record(tensor)
        left = self._left.get(buffer)
        is_real = record.known
        record.known, record.later, record.guess = False, None, ""
        if left is None:
            return
        if left.values is not None and is_real:
            with _disable_current_modes():
                tensor[: left.values.numel()].copy_(left.values)
            record.known = True
        elif left.later is not None and tensor.nbytes == tensor.untyped_storage().nbytes():
            record.later = left.later
        record.guess = left.guess


class _Reached:
    """The end of a copy, or of the device's work so far: point number `point` of the clock."""

    def __init__(self, clock: Clock, point: int) -> None:
        self._clock = clock
        self.point = point
        self.end = clock.end_of(point)

    def done(self) -> bool:
        return self._clock.now >= self.end

    def span(self) -> tuple[float, float] | None:
        # None for a point, even when done: the engine would derive its load-ahead distance from the gaps between
        # points, and the simulated memory is that of the largest distance.
        transfer = self._clock.transfer_of(self.point)
        return None if transfer is None or not self.done() else (transfer.begin, self.end)

    def error(self) -> None:
        return None


class ClockedBackend(TraceBackend):
    """A `TraceBackend` whose copies take the time of real copies, by the clock of the step.

    Args:
        caps: the caps of the tiers, as in `TraceBackend`.
        clock: the clock of the step, shared by all of its engines.
        together_bytes: as in `TraceBackend`.
    """

    def __init__(self, caps: Mapping[str, int | None], clock: Clock, *, together_bytes: int = 0) -> None:
        super().__init__(caps, together_bytes=together_bytes)
        self._clock = clock
        self._leaving: list[tuple[float, Buffer]] = []  # (time of the last read or write, freed buffer)
        self._trims = Trims() if clock.is_host else None

    def allocate(self, nbytes: int, tier: str) -> CountedBuffer | None:
        now = self._clock.now
        for at in [at for at, (end, _) in enumerate(self._leaving) if end <= now][::-1]:
            super().free(self._leaving.pop(at)[1], after=())
        return super().allocate(nbytes, tier)

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        end = max((_reached(event).end for event in after), default=0.0)
        if end > self._clock.now:
            self._leaving.append((end, buffer))
        else:
            super().free(buffer, after=after)

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        self._trim_after(nbytes)
        return super().empty(nbytes, like)

    def discard(self, tensor: torch.Tensor) -> None:
        self._trim_after(tensor.nbytes)

    def _trim_after(self, nbytes: int) -> None:
        if self._trims is not None and self._trims.due(nbytes):
            self.on_trim(False)

    def record(self, stream: int | None = None) -> Event:
        return _Reached(self._clock, self._clock.point())

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Event:
        self.on_copy(source, target)
        buffer = target if isinstance(source, torch.Tensor) else source
        assert not isinstance(buffer, torch.Tensor)
        return self._copied(buffer, stream, after)

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> Event:
        self.on_copy(sources, buffer)
        return self._copied(buffer, "out", after)

    def _copied(self, buffer: Buffer, stream: Stream, after: Sequence[Event]) -> Event:
        points = tuple(_reached(event).point for event in after)
        return _Reached(self._clock, self._clock.copy(stream, buffer.tier, buffer.nbytes, points))

    def wait(self, event: Event, stream: int | None = None) -> None:
        """Makes `stream` wait for `event`, and the host as well if the CPU carries the copy."""
        self._clock.come_after(_reached(event).point)

    def synchronize(self, event: Event) -> None:
        self._clock.hold_up(_reached(event).point)

    def clock(self) -> float:
        return self._clock.now


def _reached(event: Event) -> _Reached:
    assert isinstance(event, _Reached)
    return event


_FSDP2 = "torch.distributed.fsdp._fully_shard"


@contextmanager
def offloaded_shards(mode: FakeMode, clock: Clock, *, pins: bool) -> Iterator[None]:
    """Makes ``Tensor.to`` and ``Tensor.is_pinned`` act for FSDP2's code as if shards were on the host of a real card.

    FSDP2 copies a shard to the card in the all-gather stream, and the gradient back in the reduce-scatter stream, by
    ``Tensor.to``. In a simulation all tensors are on the CPU, where the original ``Tensor.to`` would copy nothing.

    Args:
        mode: the dispatch mode of the step, whose storages say which tensors are offloaded.
        clock: the clock of the step.
        pins: whether the shards are in pinned memory, from which copies are asynchronous.
    """
    to, is_pinned, storages = torch.Tensor.to, torch.Tensor.is_pinned, mode.storages

    def copied(tensor: torch.Tensor, direction: Direction, tier: str) -> torch.Tensor:
        clock.calls("plain")
        with _disable_current_modes():
            result = mode.fakes.alone(tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride())
        before, storages.offloaded = storages.offloaded, direction == "out"
        storages.enter(result.untyped_storage(), result, len(mode.builder.ops) - 1, "", mode.recorder.path(), False)
        storages.offloaded = before
        if knows_copies(clock.hardware):
            clock.copy_in_stream(direction, tier, tensor.nbytes)
        return result

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and _is_of_fsdp(sys._getframe(2)):
            if storages.is_offloaded(tensor):
                return copied(tensor, "in", "pinned" if pins else "pageable")
            return copied(tensor, "out", "pinned" if kwargs.get("non_blocking") else "pageable")
        return to(tensor, *args, **kwargs)

    def in_pinned(tensor: torch.Tensor, *args: Any) -> bool:
        return pins if _is_of_fsdp(sys._getframe(2)) else is_pinned(tensor, *args)

    with patched(torch.Tensor, "to", moved), patched(torch.Tensor, "is_pinned", in_pinned):
        yield


def host_bytes(builder: TraceBuilder, *, pins: bool) -> dict[str, int]:
    """Returns the most host bytes that offloaded storages of the last step hold at once, by tier.

    With `pins`, shards and gradients are ``pinned``, where PyTorch rounds each tensor up to a power of two bytes; all
    other offloaded storages are ``pageable``.
    """
    most: dict[str, int] = {}
    now = {"pinned": 0, "pageable": 0}
    begin = builder.steps[-1][0]
    for at, event in enumerate(builder.events):
        record = builder.records[abs(event) - 1]
        if record.offloaded:
            tier, nbytes = _taken(record, pins=pins)
            now[tier] += nbytes if event > 0 else -nbytes
        if at >= begin - 1:
            most = {tier: max(nbytes, most.get(tier, 0)) for tier, nbytes in now.items()}
    return {tier: nbytes for tier, nbytes in most.items() if nbytes}


def _taken(record: StorageRecord, *, pins: bool) -> tuple[str, int]:
    nbytes = math.prod(record.shape) * getattr(torch, record.dtype).itemsize
    if pins and record.category in ("parameter", "gradient"):
        return "pinned", 1 << (nbytes - 1).bit_length() if nbytes else 0
    return "pageable", nbytes


def _is_of_fsdp(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_FSDP2)
