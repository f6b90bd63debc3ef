"""All copies of an engine: asked for by deadline, counted, and noted in a timeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from memscale.runtime.backends.protocol import Backend, Buffer, Event, Stream
from memscale.runtime.engine.link import Copy, Link
from memscale.runtime.stats import CopyTimeline, Counters, add


class Transfers:
    """The two directions of a backend's link.

    Args:
        backend: what copies.
        counters: where bytes and waits are counted.
        timeline: where they are noted, or `None`.
    """

    def __init__(self, backend: Backend, counters: Counters, timeline: CopyTimeline | None) -> None:
        self.timeline = timeline
        self._backend = backend
        self._counters = counters
        self._out, self._in = Link(), Link()

    def ask_out(
        self, source: torch.Tensor, buffer: Buffer, *, seconds: float, owners: Sequence[int] | None = None
    ) -> Copy:
        """Copy a uint8 tensor of the device, as the operators before have left it, within `seconds` if possible.

        `owners` are the compute streams that it was made and used on; `None` is the caller's.
        """
        owners = (self._backend.compute_stream(),) if owners is None else owners
        after = [self._backend.record(stream) for stream in owners]

        def start() -> Event:  # by whose line a hazard is known
            return self._backend.copy(source, buffer, "out", after=after)

        note = partial(self._note, "out", buffer.tier, source.nbytes)
        return self._out.ask(start, deadline=self._backend.clock() + seconds, started=note, owners=owners)

    def ask_in(
        self,
        buffer: Buffer,
        target: torch.Tensor,
        *,
        after: Sequence[Event],
        seconds: float,
        started: Callable[[Event], None],
        group: Hashable | None = None,
    ) -> Copy:
        """Copy to a uint8 tensor of the device, which is expected to be needed in `seconds`, with others of `group`.

        `after` says when the device's memory, which is the caller's stream's, is free for it, and when the buffer's
        bytes are there.
        """

        def start() -> Event:
            return self._backend.copy(buffer, target, "in", after=after)

        owners, nbytes = (self._backend.compute_stream(),), target.nbytes

        def note(event: Event) -> None:
            started(event)
            self._note("in", buffer.tier, nbytes, event)

        return self._in.ask(start, deadline=self._backend.clock() + seconds, started=note, owners=owners, group=group)

    def _note(self, stream: Stream, tier: str, nbytes: int, event: Event) -> None:
        add(self._counters.out_bytes if stream == "out" else self._counters.in_bytes, tier, nbytes)
        if self.timeline is not None:
            self.timeline.copied(stream, tier, nbytes, event)

    def pump(self) -> None:
        """Start what may start by now."""
        self._out.pump()
        self._in.pump()

    def arrive(self, copy: Copy, memory: torch.Tensor) -> Event:
        """Let the caller's compute stream, whichever that is this time, come after a copy to `memory`, and use it."""
        stream = self._backend.compute_stream()
        if stream not in copy.owners and stream not in copy.behind:
            self._backend.lend(memory)
        return self._follow(copy, stream)

    def release(self, copy: Copy) -> Event:
        """Let the owners of the device's memory of a copy come after it, as they must before that memory is freed.

        Not the caller's stream: it may be another one, and its thread one in which a finalizer happens to run.
        """
        for stream in copy.owners:
            self._follow(copy, stream)
        return copy.need()

    def follow_owners(self, copy: Copy) -> None:
        """Let the caller's compute stream come after what the owners of the device's memory of a copy were given."""
        for stream in copy.owners:
            self._backend.wait(self._backend.record(stream))

    def no_longer(self, copy: Copy) -> None:
        """To be called before the device's memory of a copy goes to someone else."""
        if not copy.give_up():
            self.release(copy)

    def synchronize(self, event: Event) -> None:
        """Let the calling thread come after `event`. The engine's lock need not be held, for that may take long."""
        start = self._backend.clock()
        self._backend.synchronize(event)
        self._count(start)

    def _follow(self, copy: Copy, stream: int) -> Event:
        event = copy.need()
        if stream not in copy.behind:
            start = self._backend.clock()
            self._backend.wait(event, stream)
            self._count(start)
            copy.behind.add(stream)
        return event

    def _count(self, start: float) -> None:
        stop = self._backend.clock()
        self._counters.exposed_seconds += stop - start
        if self.timeline is not None and stop > start:
            self.timeline.waited(start, stop)
