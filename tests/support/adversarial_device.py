"""A device that exists only to be unkind: CPU tensors, a virtual clock, and a scheduler that picks the worst moment.

Whatever is queued on a stream, or on a worker of the disk, runs at some legal moment later, which a seed (or
hypothesis) chooses; only then do bytes really move. Bytes that have not arrived, and those of slots that were given
back, are poison: a NaN in any floating-point type.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from memscale.core.errors import CorrectnessError
from memscale.runtime.backends.protocol import Buffer, Event, Stream, one_behind_the_other
from memscale.runtime.storage.mapping import Bytes
from memscale.runtime.storage.tiers import TierUse, at_or_below

_POISON = 0xFF
Choose = Callable[[int], int]


class Deadlock(CorrectnessError):
    """The device can never reach what it was told to wait for."""


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """What a copy costs on the virtual clock."""

    bytes_per_second: float = 1e9
    latency_seconds: float = 1e-6

    def seconds(self, nbytes: int) -> float:
        return self.latency_seconds + nbytes / self.bytes_per_second


class DeviceEvent:
    """A point in a queue; knows when it was passed."""

    def __init__(self, device: AdversarialDevice) -> None:
        self._device = device
        self.finished: tuple[float, float] | None = None
        self.failure: BaseException | None = None

    def done(self) -> bool:
        self._device.let_time_pass()
        return self.finished is not None

    def span(self) -> tuple[float, float] | None:
        return self.finished

    def error(self) -> BaseException | None:
        return self.failure


@dataclasses.dataclass(eq=False)
class _Job:
    stream: str  # jobs of one stream run in order
    after: Sequence[DeviceEvent]
    run: Callable[[], None]
    seconds: float
    event: DeviceEvent


@dataclasses.dataclass(eq=False)
class Slot:
    """A slot of a tier's pool; `place` says which bytes, for the checker."""

    tier: str
    nbytes: int
    start: int

    @property
    def place(self) -> tuple[str, int]:
        return self.tier, self.start


class _Pool:
    """The bytes of a tier, handed out first fit, from those that were given back last where they fit."""

    def __init__(self, cap: int) -> None:
        self.bytes = torch.empty(cap, dtype=torch.uint8)
        self.poisoned = 0  # up to here: pages that nobody takes cost nothing
        self.taken: dict[Slot, None] = {}
        self.leaving: list[tuple[Slot, Sequence[Event]]] = []
        self.high_water = 0

    def take(self, tier: str, nbytes: int) -> Slot | None:
        spans = sorted((buffer.start, buffer.start + buffer.nbytes) for buffer in self.taken)
        start = 0
        for first, stop in spans:
            if first - start >= nbytes:
                break
            start = max(start, stop)
        if start + nbytes > len(self.bytes):
            return None
        self.bytes[self.poisoned : start + nbytes].fill_(_POISON)
        self.poisoned = max(self.poisoned, start + nbytes)
        buffer = Slot(tier, nbytes, start)
        self.taken[buffer] = None
        self.high_water = max(self.high_water, sum(taken.nbytes for taken in self.taken))
        return buffer

    def usage(self) -> TierUse:
        ends = [0, *sorted(end for buffer in self.taken for end in (buffer.start, buffer.start + buffer.nbytes))]
        gaps = [stop - start for start, stop in zip(ends[::2], [*ends[1::2], len(self.bytes)], strict=True)]
        return TierUse(self.high_water, len(self.bytes), sum(gaps), max(gaps))

    def of(self, buffer: Slot) -> torch.Tensor:
        return self.bytes[buffer.start : buffer.start + buffer.nbytes]


class AdversarialDevice:
    """A device with two copy streams, and disk workers, that run when `choose` says so.

    Args:
        choose: ``choose(n)`` is a number from 0 to n - 1: what happens next. All nondeterminism comes from here.
        caps: bytes of each tier, nearest first; one called ``"disk"`` is written and read by workers.
        link: the cost of a copy, on the virtual clock.
        fails: asked before each write to disk; what it returns, if not `None`, is how the write fails.
        together_bytes: as that of a backend.
        patience: an engine that asks a full pool more often, with nothing under way that could free any of it, is taken
            to wait forever.
    """

    def __init__(
        self,
        choose: Choose,
        caps: Mapping[str, int],
        *,
        link: LinkSpeed | None = None,
        fails: Callable[[], BaseException | None] = lambda: None,
        together_bytes: int = 0,
        patience: int = 100,
    ) -> None:
        self.tiers = tuple(caps)
        self.together_bytes = together_bytes
        self.patience = patience
        self.now = 0.0
        self._choose = choose
        self._pools = {tier: _Pool(cap) for tier, cap in caps.items()}
        self._link = link or LinkSpeed()
        self._fails = fails
        self._jobs: list[_Job] = []
        self._free_at: dict[str, float] = {}
        self._workers = 0
        self._refusals = 0

    def allocate(self, nbytes: int, tier: str) -> Slot | None:
        """See `Backend.allocate`."""
        self.let_time_pass()
        for name in at_or_below(self.tiers, tier):
            pool = self._pools[name]
            self._reclaim(pool)
            buffer = pool.take(name, nbytes)
            if buffer is not None:
                self._refusals = 0
                return buffer
        self._refusals += 1
        if self._refusals > self.patience and not self._jobs:
            raise Deadlock(
                f"deadlock on an exhausted pool: {nbytes} bytes were asked for {self._refusals} times on "
                f"{list(self.tiers)}, nothing is under way, and only the caller could free anything"
            )
        return None

    def _reclaim(self, pool: _Pool) -> None:
        waiting = []
        for buffer, events in pool.leaving:
            if all(event.done() for event in events):
                pool.of(buffer).fill_(_POISON)
                del pool.taken[buffer]
            else:
                waiting.append((buffer, events))
        pool.leaving = waiting

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        """See `Backend.free`."""
        assert isinstance(buffer, Slot)
        self._refusals = 0
        self._pools[buffer.tier].leaving.append((buffer, after))

    def map(self, buffer: Buffer) -> Bytes:
        """See `Backend.map`. The array is the pool itself, so a copy at its worst moment meets what the CPU does."""
        assert isinstance(buffer, Slot)
        found: Bytes = self._pools[buffer.tier].of(buffer).numpy()
        return found

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """See `Backend.empty`."""
        return like.new_full((nbytes,), _POISON)

    def discard(self, tensor: torch.Tensor) -> None:
        """See `Backend.discard`."""
        tensor.fill_(_POISON)

    def trim(self, *, if_grown: bool = False) -> None:
        """See `Backend.trim`."""

    def lend(self, tensor: torch.Tensor) -> None:
        """See `Backend.lend`."""

    def compute_stream(self) -> int:
        """See `Backend.compute_stream`."""
        return 0

    def record(self, stream: int | None = None) -> DeviceEvent:
        """See `Backend.record`. CPU operators have run by the time they return."""
        event = DeviceEvent(self)
        event.finished = (self.now, self.now)
        return event

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> DeviceEvent:
        """See `Backend.copy`."""
        tensor = source if isinstance(source, torch.Tensor) else target
        buffer = target if isinstance(source, torch.Tensor) else source
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(buffer, Slot)
        return self._queued(_Memory([tensor]), buffer, stream, after)

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> DeviceEvent:
        """See `Backend.gather`."""
        assert isinstance(buffer, Slot)
        return self._queued(_Memory(sources), buffer, "out", after)

    def _queued(self, memory: _Memory, buffer: Slot, stream: Stream, after: Sequence[Event]) -> DeviceEvent:
        event = DeviceEvent(self)
        before = [wanted for wanted in after if isinstance(wanted, DeviceEvent)]
        out = stream == "out"
        slot = self._pools[buffer.tier].of(buffer)
        seconds = self._link.seconds(buffer.nbytes)
        if buffer.tier == "disk":
            self._copy_through_worker(memory, slot, stream, before, event, seconds, out=out)
        else:
            run = (lambda: memory.read_into(slot)) if out else (lambda: memory.write_from(slot))
            self._jobs.append(_Job(stream, before, run, seconds, event))
        self.let_time_pass()
        return event

    def _copy_through_worker(
        self,
        memory: _Memory,
        slot: torch.Tensor,
        stream: Stream,
        before: Sequence[DeviceEvent],
        event: DeviceEvent,
        seconds: float,
        *,
        out: bool,
    ) -> None:
        staging = torch.full_like(slot, _POISON)
        halfway = DeviceEvent(self)
        self._workers += 1
        worker = f"worker {self._workers}"  # workers take what they find: no order among them

        def write() -> None:
            event.failure = self._fails()
            if event.failure is None:
                slot.copy_(staging)

        if out:
            self._jobs.append(_Job(stream, before, lambda: memory.read_into(staging), seconds, halfway))
            self._jobs.append(_Job(worker, [halfway], write, seconds, event))
        else:
            self._jobs.append(_Job(worker, before, lambda: _assign(staging, slot), seconds, halfway))
            self._jobs.append(_Job(stream, [halfway], lambda: memory.write_from(staging), seconds, event))

    def wait(self, event: Event, stream: int | None = None) -> None:
        """See `Backend.wait`. Operators run at once here, so what the compute stream waits for must happen now."""
        self._reach(event, "the compute stream")

    def synchronize(self, event: Event) -> None:
        """See `Backend.synchronize`. The thread that waits is the one whose operators are the compute stream."""
        self._reach(event, "the calling thread")

    def _reach(self, event: Event, who: str) -> None:
        assert isinstance(event, DeviceEvent)
        while event.finished is None:
            if not self._run_some():
                raise Deadlock(f"deadlock: {who} waits for a copy that nothing will ever start")
        self.now = max(self.now, event.finished[1])

    def clock(self) -> float:
        """See `Backend.clock`."""
        return self.now

    def compute(self, seconds: float) -> None:
        """Let the caller compute for so long on the virtual clock."""
        self.now += seconds
        self.let_time_pass()

    def usage(self) -> Mapping[str, TierUse]:
        """See `Backend.usage`."""
        return {tier: pool.usage() for tier, pool in self._pools.items()}

    def let_time_pass(self) -> None:
        """Run some of what is queued, or nothing."""
        while self._jobs and self._choose(3) == 0 and self._run_some():
            pass

    def _run_some(self) -> bool:
        streams: set[str] = set()
        runnable = []
        for job in self._jobs:
            if job.stream not in streams and all(event.finished is not None for event in job.after):
                runnable.append(job)
            streams.add(job.stream)
        if not runnable:
            return False
        job = runnable[self._choose(len(runnable))]
        self._jobs.remove(job)
        ready = [event.finished[1] for event in job.after if event.finished is not None]
        start = max([self._free_at.get(job.stream, 0.0), *ready])
        self._free_at[job.stream] = start + job.seconds
        job.run()
        job.event.finished = (start, start + job.seconds)
        return True


class _Memory:
    """Some bytes of tensors, without keeping their memory alive: a queued copy on a device does not either."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Python's reference, not PyTorch's `StorageWeakRef`, whose own finalizer may have run when that of a handle,
        # in the same garbage, lets queued copies run.
        self._pieces = [
            (start, weakref.ref(tensor.untyped_storage()), tensor.storage_offset() * tensor.itemsize, tensor.nbytes)
            for start, tensor in one_behind_the_other(tensors)
        ]

    def _bytes(self) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        for start, reference, offset, nbytes in self._pieces:
            storage = reference()
            found = (
                None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage, offset, (nbytes,), (1,))
            )
            yield start, start + nbytes, found

    def read_into(self, target: torch.Tensor) -> None:
        for start, stop, found in self._bytes():
            if found is None:
                target[start:stop].fill_(_POISON)
            else:
                target[start:stop].copy_(found)

    def write_from(self, source: torch.Tensor) -> None:
        for start, stop, found in self._bytes():
            if found is not None:
                found.copy_(source[start:stop])


def _assign(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
