"""The runtimes of a simulated step: each records the copies and the bytes of a real runtime, and moves nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import format_bytes
from memscale.hardware import assumed_speeds, knows_copies
from memscale.runtime import HostParameter, HostParameters, Runtime
from memscale.runtime.backends import Backend, Buffer, TraceBackend
from memscale.runtime.engine import Engine
from memscale.runtime.parameters import MappedTensors, is_movable
from memscale.simulation.dispatch.lazy_values import LazyValue
from memscale.simulation.dispatch.live_storages import LiveStorages, is_small
from memscale.simulation.schedule.backend import ClockedBackend
from memscale.simulation.schedule.clock import Clock


class CountingRuntimes:
    """The counting runtimes of a simulation: one in place of each runtime that the step uses.

    Args:
        clock: the clock of the simulated device.
        make_offloaded: makes a uint8 CPU tensor of so many bytes, which takes no memory of the simulated device.
        references: storage -> the number of references that the simulation itself holds.
        on_trim: called where a runtime would empty the device's cache; its argument means: only if memory has grown.
        on_copy: called with the source and the target of each copy, a tensor of bytes and a buffer.

    Attributes:
        by_storage: address of a storage -> the host parameter, for storages on another tier in the simulation.
    """

    def __init__(
        self,
        clock: Clock,
        make_offloaded: Callable[[int], torch.Tensor],
        references: Callable[[torch.UntypedStorage], int],
        on_trim: Callable[[bool], object],
        on_copy: Callable[[torch.Tensor | Buffer, torch.Tensor | Buffer], object],
    ) -> None:
        self.clock = clock
        self.make_offloaded = make_offloaded
        self.references = references
        self.on_trim = on_trim
        self.on_copy = on_copy
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
        hardware = self.clock.hardware
        if assumed := assumed_speeds(
            hardware,
            disk=any(transfer.tier == "disk" for transfer in self.clock.transfers),
            host=bool(self.clock.on_host),
        ):
            found.append(f"{hardware.name} does not say {assumed}; Hardware.measure() there finds out")
        return found

    def in_place_of(self, runtime: Runtime) -> Runtime:
        """Returns the counting runtime in place of `runtime`."""
        if runtime not in self._made:
            self._made[runtime] = CountingRuntime(runtime, self)
        return self._made[runtime]


class CountingRuntime(Runtime):
    """A runtime that has the caps of a real one, on a device whose tensors have no values."""

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
        backend = ClockedBackend(caps, self._step.clock) if known else TraceBackend(caps)
        backend.on_trim, backend.on_copy = self._step.on_trim, self._step.on_copy
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
        return _FakeMemory(self.engine, self._step.make_offloaded)

    def is_movable(self, parameter: torch.Tensor) -> bool:
        return is_movable(parameter, besides=self._step.references)


class _FakeMemory(MappedTensors):
    def __init__(self, engine: Engine, make_offloaded: Callable[[int], torch.Tensor]) -> None:
        super().__init__(engine)
        self._make_offloaded = make_offloaded

    def tensor_over(self, buffer: Buffer, backend: Backend) -> torch.Tensor:
        return self._make_offloaded(buffer.nbytes)


@dataclass(frozen=True)
class _Left:
    """The state of an offloaded storage's values: `guess` and `later` of its `StorageRecord`, and any real values."""

    guess: str
    later: LazyValue | None
    values: torch.Tensor | None


class CarriedValues:
    """The values of tensors that the counting runtimes would move; the runtimes themselves move no bytes.

    Without this class a fetched tensor would have arbitrary values, and a step that reads these (an index, a mask, the
    number of an expert) would take another path in each simulation.
    """

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages
        self._left: weakref.WeakKeyDictionary[Buffer, _Left] = weakref.WeakKeyDictionary()

    def copied(self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer) -> None:
        """Copies the values of a tensor of bytes and a buffer, from source to target."""
        if isinstance(source, torch.Tensor):
            assert not isinstance(target, torch.Tensor)
            self._leave(source, target)
        else:
            assert isinstance(target, torch.Tensor)
            self._come_back(source, target)

    def _leave(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        record = self._storages.record(tensor)
        whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        values = None
        if record.known and record.later is None and is_small(tensor):
            with _disable_current_modes():
                values = tensor.clone()
        self._left[buffer] = _Left(record.guess, record.later if whole else None, values)

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
