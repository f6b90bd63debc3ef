"""`Transfers`: requests the copies of an engine in both directions, and counts bytes and waits."""

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
        backend: the backend that copies.
        counters: counts bytes and waits.
        timeline: records copies and waits, or None.
    """

    def __init__(self, backend: Backend, counters: Counters, timeline: CopyTimeline | None) -> None:
        self.timeline = timeline
        self._backend = backend
        self._counters = counters
        self._out, self._in = Link(), Link()

    def ask_out(
        self, sources: Sequence[torch.Tensor], buffer: Buffer, *, seconds: float, owners: Sequence[int] | None = None
    ) -> Copy:
        """Requests a copy of a uint8 device tensor, or of several as by `Backend.gather`, within `seconds` if possible.

        The copy starts after the work that is queued on `owners` now. `owners` are the compute streams that made and
        used the tensor; None is the caller's stream.
        """
        owners = (self._backend.compute_stream(),) if owners is None else owners
        after = [self._backend.record(stream) for stream in owners]

        def start() -> Event:  # a named function: the checker in tests names a hazard by its line
            if len(sources) > 1:
                return self._backend.gather(sources, buffer, after=after)
            return self._backend.copy(sources[0], buffer, "out", after=after)

        note = partial(self._note, "out", buffer.tier, buffer.nbytes)
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
        """Requests a copy of `buffer` to a uint8 device tensor, expected to be needed in `seconds`, with its `group`.

        The events in `after` say when the device memory, which belongs to the caller's stream, is free, and when the
        buffer holds its bytes.
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
        """Starts the copies that fit in the windows."""
        if self._out.waiting:
            self._out.pump()
        if self._in.waiting:
            self._in.pump()

    def arrive(self, copy: Copy, memory: torch.Tensor) -> Event:
        """Makes the caller's present compute stream wait for a copy to `memory`, and marks the memory as used there."""
        stream = self._backend.compute_stream()
        if copy.event is not None and stream in copy.behind:
            return copy.event
        if stream not in copy.owners and stream not in copy.behind:
            self._backend.lend(memory)
        return self._follow(copy, stream)

    def release(self, copy: Copy) -> Event:
        """Makes the owners of a copy's device memory wait for it, as they must before that memory is freed.

        The caller's stream is not among them: the caller may be a finalizer in an unrelated thread.
        """
        for stream in copy.owners:
            self._follow(copy, stream)
        return copy.need()

    def follow_owners(self, copy: Copy) -> None:
        """Makes the caller's compute stream wait for the work queued on the owners of a copy's device memory."""
        for stream in copy.owners:
            self._backend.wait(self._backend.record(stream))

    def no_longer(self, copy: Copy) -> None:
        """Cancels a copy, or makes its owners wait for it, before its device memory is reused."""
        if not copy.give_up():
            self.release(copy)

    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until `event`. This may take long, so the engine's lock need not be held."""
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
