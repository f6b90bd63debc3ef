"""The backend of a simulated step: moves no bytes, and reports the times at which copies would end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from memscale.runtime.backends import Buffer, CountedBuffer, Event, Stream, TraceBackend, Trims
from memscale.simulation.schedule.clock import Clock
from memscale.simulation.trace import Transfer


class _Reached:
    """The end of a copy; without a copy, the end of the device's work so far."""

    def __init__(self, clock: Clock, transfer: Transfer | None = None) -> None:
        self._clock = clock
        self.transfer = transfer
        self.end = clock.point() if transfer is None else transfer.end
        self.op = len(clock.ends)

    def done(self) -> bool:
        return self._clock.now >= self.end

    def span(self) -> tuple[float, float] | None:
        # A point has no span, even when done: the engine would take the gaps between points for its load-ahead
        # distance, and the memory of a step is that of the largest distance.
        return None if self.transfer is None or not self.done() else (self.transfer.begin, self.end)

    def error(self) -> None:
        return None


class ClockedBackend(TraceBackend):
    """A `TraceBackend` with the times of real copies.

    Args:
        caps: the caps of the tiers, as in `TraceBackend`.
        clock: the clock of the step, shared by all of its engines.
    """

    def __init__(self, caps: Mapping[str, int | None], clock: Clock) -> None:
        super().__init__(caps)
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
        return _Reached(self._clock)

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Event:
        self.on_copy(source, target)
        buffer = target if isinstance(source, torch.Tensor) else source
        assert not isinstance(buffer, torch.Tensor)
        reached = [*map(_reached, after)]
        requested = max((event.op for event in reached if event.transfer is None), default=len(self._clock.ends))
        ready = max((event.end for event in reached), default=0.0)
        return _Reached(
            self._clock, self._clock.copy(stream, buffer.tier, buffer.nbytes, ready=ready, requested=requested)
        )

    def wait(self, event: Event, stream: int | None = None) -> None:
        """Makes `stream` wait for `event`. The host waits only if the CPU takes part in the copy."""
        if (transfer := _reached(event).transfer) is not None:
            self._clock.come_after(transfer)

    def synchronize(self, event: Event) -> None:
        transfer = _reached(event).transfer
        self._clock.hold_up(_reached(event).end, "host" if transfer is None else transfer.cause)

    def clock(self) -> float:
        return self._clock.now


def _reached(event: Event) -> _Reached:
    assert isinstance(event, _Reached)
    return event
