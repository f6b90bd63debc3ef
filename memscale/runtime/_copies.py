"""All copies of an engine: asked for by deadline, counted, and noted in a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memscale.runtime._link import Copy, Link
from memscale.runtime._protocol import Backend, Buffer, Event
from memscale.runtime._stats import Counters, Timeline, add


class Copies:
    """The two directions of a backend's link.

    Args:
        backend: what copies.
        counters: where bytes and waits are counted.
        timeline: where they are noted, or `None`.
    """

    def __init__(self, backend: Backend, counters: Counters, timeline: Timeline | None) -> None:
        self.timeline = timeline
        self._backend = backend
        self._counters = counters
        self._out, self._in = Link(), Link()

    def ask_out(self, source: torch.Tensor, buffer: Buffer, *, seconds: float) -> Copy:
        """Copy a uint8 tensor of the device, as the operators before have left it, within `seconds` if possible."""
        after = (self._backend.record("compute"),)

        def start() -> Event:
            return self._backend.copy(source, buffer, "out", after=after)

        nbytes = source.nbytes

        def note(event: Event) -> None:
            add(self._counters.out_bytes, buffer.tier, nbytes)
            if self.timeline is not None:
                self.timeline.copied("out", buffer.tier, nbytes, event)

        return self._out.ask(start, deadline=self._backend.clock() + seconds, started=note)

    def ask_in(
        self,
        buffer: Buffer,
        target: torch.Tensor,
        *,
        after: Sequence[Event],
        seconds: float,
        started: Callable[[Event], None],
    ) -> Copy:
        """Copy to a uint8 tensor of the device, which is expected to be needed in `seconds`.

        `after` says when the device's memory is free for it, and when the buffer's bytes are there.
        """

        def start() -> Event:
            return self._backend.copy(buffer, target, "in", after=after)

        nbytes = target.nbytes

        def note(event: Event) -> None:
            started(event)
            add(self._counters.in_bytes, buffer.tier, nbytes)
            if self.timeline is not None:
                self.timeline.copied("in", buffer.tier, nbytes, event)

        return self._in.ask(start, deadline=self._backend.clock() + seconds, started=note)

    def pump(self) -> None:
        """Start what may start by now."""
        self._out.pump()
        self._in.pump()

    def wait(self, event: Event) -> None:
        """Let the compute stream come after `event`."""
        start = self._backend.clock()
        self._backend.wait(event)
        stop = self._backend.clock()
        self._counters.exposed_seconds += stop - start
        if self.timeline is not None and stop > start:
            self.timeline.waited(start, stop)

    def no_longer(self, copy: Copy) -> None:
        """To be called before the device's memory of a copy goes to someone else."""
        if not copy.give_up():
            self.wait(copy.need())

    def end(self, copy: Copy) -> None:
        """The same, from any thread, whose compute stream need not be the one that the memory goes back to."""
        self.no_longer(copy)
        if copy.event is not None:
            self._backend.synchronize(copy.event)
