"""The runtimes of a simulated step: each counts what the one in whose place it is would move, and when,
and moves nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memscale.hardware import knows_copies
from memscale.runtime import Home, Homes, Runtime
from memscale.runtime.backends import Backend, Buffer, TraceBackend
from memscale.runtime.engine import Engine
from memscale.runtime.parameters import MappedTensors, is_movable
from memscale.simulation.schedule.backend import ClockedBackend
from memscale.simulation.schedule.clock import Clock


class CountingRuntimes:
    """One for each runtime that the step uses.

    Args:
        clock: of the device that is simulated, whatever the tensors say.
        away: makes a uint8 CPU tensor of so many bytes that takes up no memory of the simulated device.
        references: how many tensors refer to a storage for the simulation's own sake.
        on_trim: called where a runtime has the device give back what it only caches.

    Attributes:
        at_home: what lives on another tier in the simulation, by storage.
    """

    def __init__(
        self,
        clock: Clock,
        away: Callable[[int], torch.Tensor],
        references: Callable[[torch.UntypedStorage], int],
        on_trim: Callable[[], object],
    ) -> None:
        self.clock = clock
        self.away = away
        self.references = references
        self.on_trim = on_trim
        self.at_home: dict[int, Home] = {}
        self.engines: list[Engine] = []
        self._made: dict[Runtime, CountingRuntime] = {}

    def in_place_of(self, runtime: Runtime) -> Runtime:
        """What a region uses here that would use `runtime`."""
        if runtime not in self._made:
            self._made[runtime] = CountingRuntime(runtime, self)
        return self._made[runtime]


class CountingRuntime(Runtime):
    """A runtime with the caps of another one, on a device where nothing has values."""

    def __init__(self, real: Runtime, step: CountingRuntimes) -> None:
        super().__init__(real.config)
        self._real = real
        self._step = step

    @property
    def has_values(self) -> bool:
        return False

    @property
    def at_home(self) -> dict[int, Home]:
        return self._step.at_home

    def _new_backend(self, tensor: torch.Tensor) -> TraceBackend:
        clock = self._step.clock
        caps = self._real.caps(clock.hardware.device_type)
        backend = ClockedBackend(caps, clock) if knows_copies(clock.hardware) else TraceBackend(caps)
        backend.on_trim = self._step.on_trim
        return backend

    def _new_engine(self, tensor: torch.Tensor) -> Engine:
        engine = super()._new_engine(tensor)
        self._step.engines.append(engine)
        return engine

    def _new_homes(self, engine: Engine) -> Homes:
        return _HollowHomes(engine, self._step)


class _HollowHomes(Homes):
    """Parameters that have sizes and no values."""

    def __init__(self, engine: Engine, step: CountingRuntimes) -> None:
        self._step = step
        super().__init__(engine, step.at_home)

    def new_memory(self) -> MappedTensors:
        return _HollowMemory(self.engine, self._step.away)

    def is_movable(self, parameter: torch.Tensor) -> bool:
        return is_movable(parameter, besides=self._step.references)


class _HollowMemory(MappedTensors):
    def __init__(self, engine: Engine, away: Callable[[int], torch.Tensor]) -> None:
        super().__init__(engine)
        self._away = away

    def tensor_over(self, buffer: Buffer, backend: Backend) -> torch.Tensor:
        return self._away(buffer.nbytes)
