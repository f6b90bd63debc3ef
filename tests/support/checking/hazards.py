"""Finds races between copies, whether or not they went wrong this time.

Every stream has a vector clock; an event carries that of its point in the stream, and waiting for the event takes it
over. Each access to a range of bytes is remembered with the clock of its stream. Two accesses that touch the same
bytes, one of them a write, must be ordered by these clocks. If they are not, that is a hazard on *some* schedule, and
it is reported with both call sites, even where the schedule at hand was kind.

`Checked` stands between an engine and any backend; `CheckedEngine`, beside this file, tells it what no backend is told:
when the caller makes and uses tensors. Whoever reads or writes memory that `Checked.map` returned says so to
`Checked.touched`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from memscale.core import CorrectnessError, version
from memscale.runtime.backends.protocol import Backend, Buffer, Event, Stream
from memscale.runtime.storage.mapping import Bytes
from memscale.runtime.storage.tiers import TierUse
from tests.support.checking.accesses import Access, Accesses, Clock, join

_LOG = logging.getLogger(__name__)
_HERE = os.path.dirname(__file__)
USED_EARLY = "use before a copy completes"
READ_EARLY = "source read before it was computed"
SOURCE_FREED = "source freed before its copy out ends"
SOURCE_OVERWRITTEN = "source overwritten before its copy out ends"
SLOT_REUSED = "slot reused early"
RELOAD_OVERWRITTEN = "reload buffer overwritten in use"
RELOAD_FREED = "reload buffer freed before its copy in ends"
READ_BEFORE_WRITE = "read before write"
PREFETCHED_TWICE = "double prefetch"
PREFETCHED_LATE = "prefetch after consume"
FREED_TWICE = "slot freed twice"
TOUCHED_EARLY = "mapped memory touched while a copy is under way"
TOUCHED_LATE = "mapped memory touched after it was freed"
DEADLOCK = "deadlock on an exhausted pool"
LEAK = "leak"


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Two places in the code whose effects on the same bytes have no order, or one whose effect is never undone."""

    kind: str
    here: str
    other_site: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}, at {self.here}; the other side is {self.other_site}"


class CheckedEvent:
    """An event with the clock of its point in the stream."""

    def __init__(self, inner: Event, clock: Clock, checked: Checked) -> None:
        self.inner = inner
        self.clock = clock
        self._checked = checked

    def done(self) -> bool:
        done = self.inner.done()
        if done:  # whoever asked now knows, and all that is queued from here on comes after
            join(self._checked.observed, self.clock)
        return done

    def span(self) -> tuple[float, float] | None:
        return self.inner.span()

    def error(self) -> BaseException | None:
        return self.inner.error()


@dataclasses.dataclass(eq=False)
class CheckedBuffer:
    """A buffer and what was done to its bytes since it was allocated."""

    inner: Buffer
    site: str
    written: Access | None = None
    freed: str | None = None
    mapped: bool = False
    # Where copies into the device were asked for that nobody has used yet, by the storage that each fills.
    loading: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def tier(self) -> str:
        return self.inner.tier

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def place(self) -> tuple[Any, int, int]:
        """Where its bytes are: a space, the first and the last but one."""
        space, start = getattr(self.inner, "place", (self, 0))
        return space, start, start + self.nbytes

    def __str__(self) -> str:
        return f"{self.nbytes} bytes on {self.tier}"


class Checked:
    """A backend that does what `inner` does and looks for hazards.

    A buffer of `inner` may say where its bytes are, as ``place = (name of a space, offset)``; slots that are reused
    are then known to be the same bytes. All compute streams count as one: how the caller orders them is not seen.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.tiers = inner.tiers
        self.together_bytes = inner.together_bytes
        self.lend, self.compute_stream, self.trim = inner.lend, inner.compute_stream, inner.trim
        self.hazards: list[Hazard] = []
        self.observed: Clock = {}  # what the host knows to be done
        self._clocks: dict[str, Clock] = {"compute": {"compute": 1}, "out": {}, "in": {}}
        self._device: dict[int, list[Access]] = {}
        self._versions: dict[int, int] = {}
        self._on_tiers = Accesses()
        self._live: dict[CheckedBuffer, None] = {}
        self._loading: dict[int, CheckedBuffer] = {}

    # -------------------------------------------------------------------------------------- what a backend does

    def allocate(self, nbytes: int, tier: str) -> CheckedBuffer | None:
        inner = self.inner.allocate(nbytes, tier)
        if inner is None:
            return None
        buffer = CheckedBuffer(inner, _site())
        self._live[buffer] = None
        return buffer

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        assert isinstance(buffer, CheckedBuffer)
        if buffer.freed is not None:
            self._report(FREED_TWICE, buffer.freed, str(buffer))
            return
        buffer.freed = _site()
        del self._live[buffer]
        self.inner.free(buffer.inner, after=after)

    def map(self, buffer: Buffer) -> Bytes:
        """See `Backend.map`. The host may write the buffer from here on, so a copy of it always finds something."""
        assert isinstance(buffer, CheckedBuffer)
        is_new = not (buffer.mapped or buffer.written or buffer.loading or buffer.freed)
        assert is_new, f"{buffer} are mapped after they were mapped, copied or freed"
        buffer.mapped = True
        self._check_slot(buffer, self.observed)
        # The place was others' before. What the backend knew to be done need not be observed by the host once more.
        self._on_tiers.forget(*buffer.place)
        return self.inner.map(buffer.inner)

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        tensor = self.inner.empty(nbytes, like)
        self.produced(tensor)
        return tensor

    def discard(self, tensor: torch.Tensor) -> None:
        self._touch(tensor, "write", {"read": SOURCE_OVERWRITTEN})
        self.inner.discard(tensor)

    def record(self, stream: int | None = None) -> CheckedEvent:
        clock = self._clocks["compute"]
        event = CheckedEvent(self.inner.record(stream), dict(clock), self)
        clock["compute"] += 1
        return event

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> CheckedEvent:
        tensor = source if isinstance(source, torch.Tensor) else target
        buffer = target if isinstance(source, torch.Tensor) else source
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(buffer, CheckedBuffer)
        out = tensor is source
        inner_source, inner_target = (source, buffer.inner) if out else (buffer.inner, target)
        return self._checked(
            [tensor],
            buffer,
            stream,
            after,
            lambda events: self.inner.copy(inner_source, inner_target, stream, after=events),
        )

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> CheckedEvent:
        assert isinstance(buffer, CheckedBuffer)
        return self._checked(
            sources, buffer, "out", after, lambda events: self.inner.gather(sources, buffer.inner, after=events)
        )

    def _checked(
        self,
        tensors: Sequence[torch.Tensor],
        buffer: CheckedBuffer,
        stream: Stream,
        after: Sequence[Event],
        copy: Callable[[list[Event]], Event],
    ) -> CheckedEvent:
        clock, out = self._clocks[stream], stream == "out"
        join(clock, self.observed)
        for event in after:
            assert isinstance(event, CheckedEvent)
            join(clock, event.clock)
        clock[stream] = time = clock.get(stream, 0) + 1
        _LOG.debug("%s: %d bytes, %s, for %s", stream, buffer.nbytes, buffer.tier, _site())
        for tensor in tensors:
            self._check_on_device(tensor, buffer, clock, out=out)
        self._check_on_tier(buffer, clock, out=out)
        inner = copy([event.inner for event in after])  # type: ignore[attr-defined]
        done = CheckedEvent(inner, dict(clock), self)
        self._note_copy(tensors, buffer, stream, time, done, out=out)
        return done

    def wait(self, event: Event, stream: int | None = None) -> None:
        assert isinstance(event, CheckedEvent)
        self.inner.wait(event.inner, stream)
        join(self._clocks["compute"], event.clock)

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        self.inner.synchronize(event.inner)
        join(self.observed, event.clock)

    def clock(self) -> float:
        return self.inner.clock()

    def usage(self) -> Mapping[str, TierUse]:
        return self.inner.usage()

    # --------------------------------------------------------------------------------- what only a checker hears

    def produced(self, tensor: torch.Tensor) -> None:
        """The caller has `tensor`, which its operators wrote, or read if this is not the first time."""
        key, now = tensor.untyped_storage()._cdata, version(tensor)
        if self._versions.get(key) == now:  # what backward was given back may be saved again
            self._touch(tensor, "read", {"write": USED_EARLY})
        else:
            self._touch(tensor, "write", {"read": SOURCE_OVERWRITTEN, "write": RELOAD_OVERWRITTEN})
        self._versions[key] = now

    def touched(self, buffer: Buffer, *, write: bool) -> None:
        """The calling thread reads, and if `write` also writes, the memory that `map` returned for `buffer`, now.

        Every copy that writes these bytes must be done, and if `write` every copy that reads them; and the thread must
        know it, by `synchronize` or because it asked `done`. That the compute stream waits is not enough.
        """
        assert isinstance(buffer, CheckedBuffer)
        assert buffer.mapped, f"{buffer} are touched and were never mapped"
        if buffer.freed is not None:
            self._report(TOUCHED_LATE, buffer.freed, str(buffer))
            return
        for access in self._on_tiers.at(*buffer.place):
            if (write or access.kind == "write") and not access.before(self.observed):
                self._report(TOUCHED_EARLY, access.site, f"{buffer}, {'written' if write else 'read'} by the CPU")

    def used(self, tensor: torch.Tensor) -> None:
        """The caller's operators read `tensor` from here on."""
        self._touch(tensor, "read", {"write": USED_EARLY})
        self.taken(tensor)

    def taken(self, tensor: torch.Tensor) -> None:
        """Somebody asked for `tensor`: its load was not in vain."""
        buffer = self._loading.pop(tensor.untyped_storage()._cdata, None)
        if buffer is not None:
            buffer.loading.pop(tensor.untyped_storage()._cdata, None)

    def used_by_host(self, memory: torch.Tensor) -> None:
        """The calling thread uses `memory`, which is the host's, and frees it itself: what it waited for is over."""
        self.taken(memory)
        accesses = self._accesses(memory)
        accesses[:] = [access for access in accesses if not access.before(self.observed)]

    def finish(self) -> list[Hazard]:
        """All hazards, once nothing should be held any more."""
        for buffer in self._live:
            what = f"{buffer} outlive every handle"
            self.hazards.append(Hazard(LEAK, "the end", buffer.site, what))
        self._live.clear()
        return self.hazards

    def raise_hazards(self) -> None:
        """Raise `CorrectnessError` with the hazards found so far."""
        if self.hazards:
            found, self.hazards = self.hazards, []
            raise CorrectnessError("hazards in the offload runtime:\n" + "\n".join(map(str, found)))

    # ---------------------------------------------------------------------------------------------------- rules

    def _check_on_device(self, tensor: torch.Tensor, buffer: CheckedBuffer, clock: Clock, *, out: bool) -> None:
        for access in self._accesses(tensor):
            if not access.before(clock) and access.kind == "write" and out:
                self._report(READ_EARLY, access.site, str(buffer))
            elif not access.before(clock) and not out:
                self._report(RELOAD_OVERWRITTEN, access.site, str(buffer))

    def _check_on_tier(self, buffer: CheckedBuffer, clock: Clock, *, out: bool) -> None:
        what = str(buffer)
        if buffer.freed is not None:
            self._report(SLOT_REUSED if out else PREFETCHED_LATE, buffer.freed, what)
        if out:
            self._check_slot(buffer, clock)
            return
        if buffer.written is None:
            if not buffer.mapped:
                self._report(READ_BEFORE_WRITE, buffer.site, what)
        elif not buffer.written.before(clock):
            self._report(READ_BEFORE_WRITE, buffer.written.site, what)
        for site in buffer.loading.values():
            self._report(PREFETCHED_TWICE, site, what)

    def _check_slot(self, buffer: CheckedBuffer, clock: Clock) -> None:
        for access in self._on_tiers.at(*buffer.place):
            if not access.before(clock) and not (access.event is not None and access.event.done()):
                self._report(SLOT_REUSED, access.site, str(buffer))

    def _note_copy(
        self,
        tensors: Sequence[torch.Tensor],
        buffer: CheckedBuffer,
        stream: Stream,
        time: int,
        event: Event,
        *,
        out: bool,
    ) -> None:
        site = _site()
        space, start, stop = buffer.place
        on_tier = Access("write" if out else "read", start, stop, stream, time, site, event)
        if out:
            self._on_tiers.forget(space, start, stop)
            buffer.written = on_tier
        self._on_tiers.add(space, on_tier, self._clocks[stream])
        for tensor in tensors:
            first = int(tensor.storage_offset()) * tensor.itemsize
            on_device = Access("read" if out else "write", first, first + tensor.nbytes, stream, time, site, event)
            self._accesses(tensor).append(on_device)
        if not out:
            key = tensors[0].untyped_storage()._cdata
            buffer.loading[key] = site
            self._loading[key] = buffer

    def _touch(self, tensor: torch.Tensor, kind: Literal["read", "write"], rules: Mapping[str, str]) -> None:
        clock = self._clocks["compute"]
        start = int(tensor.storage_offset()) * tensor.element_size()
        accesses = self._accesses(tensor)
        for access in accesses:
            if access.kind in rules and not access.before(clock):
                self._report(rules[access.kind], access.site, f"{tensor.dtype}{list(tensor.shape)}")
        accesses[:] = [access for access in accesses if access.stream != "compute"]
        accesses.append(Access(kind, start, sys.maxsize, "compute", clock["compute"], _site()))

    def _accesses(self, tensor: torch.Tensor) -> list[Access]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._device:
            self._device[key] = []
            weakref.finalize(storage, self._freed, key).atexit = False
        return self._device[key]

    def _freed(self, key: int) -> None:
        """The device's memory at `key` went back to its allocator, whose next user comes after the compute stream."""
        self._versions.pop(key, None)
        early = [
            access
            for access in self._device.pop(key, [])
            if access.stream != "compute" and not access.before(self._clocks["compute"])
        ]
        for access in early:
            self._report(SOURCE_FREED if access.kind == "read" else RELOAD_FREED, access.site, "device memory")
        buffer = self._loading.pop(key, None)
        if buffer is not None:
            site = buffer.loading.pop(key)
            if early:  # nobody gave this load up: it was forgotten
                buffer.loading[-len(buffer.loading) - 1] = site

    def _report(self, kind: str, other_site: str, what: str) -> None:
        self.hazards.append(Hazard(kind, _site(), other_site, what))


def _site() -> str:
    """Where the engine, or its caller, asked for what is being checked."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
