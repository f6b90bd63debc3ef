"""The streams and events of a simulated device, in the interface that FSDP2 calls, timed by the clock of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from memscale.simulation.schedule.clock import Clock, Mark, SideStream


class SimulatedEvent:
    """A point in a simulated stream, as ``torch.cuda.Event``."""

    def __init__(self, clock: Clock, *_: Any, **__: Any) -> None:
        self._clock = clock
        self.mark: Mark | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.mark = self._clock.mark(self._clock.stream if stream is None else stream.side)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        if self.mark is not None:
            self._clock.wait(self.mark, self._clock.stream if stream is None else stream.side)

    def query(self) -> bool:
        return self.mark is None or self.mark.end <= self._clock.now

    def synchronize(self) -> None:
        if self.mark is not None:
            self._clock.hold_up_for(self.mark)


class SimulatedStream:
    """A simulated stream, as ``torch.cuda.Stream``: the main stream where `side` is None, else a side stream."""

    def __init__(self, clock: Clock, side: SideStream | None) -> None:
        self._clock = clock
        self.side = side

    def wait_stream(self, other: SimulatedStream) -> None:
        self._clock.wait(self._clock.mark(other.side), self.side)

    def wait_event(self, event: Any) -> None:
        if isinstance(event, SimulatedEvent):  # a real event was recorded before the simulation, and is complete
            event.wait(self)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent(self._clock) if event is None else event
        event.record(self)
        return event


class SimulatedStreams:
    """The part of a device module (such as ``torch.cuda``) that FSDP2 uses: its streams and events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._current = SimulatedStream(clock, None)
        self.Event = partial(SimulatedEvent, clock)

    def Stream(self, priority: int = 0) -> SimulatedStream:
        return SimulatedStream(self._clock, SideStream())

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self._current

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, side = self._current, self._clock.stream
        self._current, self._clock.stream = stream, stream.side
        try:
            yield
        finally:
            self._current, self._clock.stream = before, side
