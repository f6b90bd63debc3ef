"""The offload engine: `stash` a tensor, `fetch` it later; in between its bytes live on another tier.

**The last keeper moves.** A storage that something else keeps alive (a parameter, a view that the caller holds) is not
copied, since that frees nothing. Nobody can know this when a tensor is stashed, for the operator that made it still
holds it. So a stashed storage waits on the device, and the engine looks again at every later stash: once nobody but its
handles refers to it, it moves. From then on it is out of everyone's reach, so its bytes and its version are final.

**Handles own their bytes.** There is no table of a step's tensors that a dropped graph could leave entries in: the
bytes of a storage go when the last handle on one of its views does, on whatever tier they are at that moment.

**Order is a hint.** In which order backward asks is learned from the backward before, and only decides what is loaded
ahead. A wrong guess costs time, never correctness.

What stands above an engine, as the parameters that live on another tier do, uses its links and loaders and follows its
passes (`Follower`); the engine knows nothing of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from memscale.core import version
from memscale.runtime.backends.protocol import Backend, Buffer
from memscale.runtime.engine.ahead import Ahead
from memscale.runtime.engine.entry import Entry, Handle, Record, hull, is_unshared
from memscale.runtime.engine.finalized import Finalized
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.loader import Loader, State
from memscale.runtime.engine.locks import new_lock
from memscale.runtime.engine.refusals import warn_of_staying
from memscale.runtime.engine.transfers import Transfers
from memscale.runtime.stats import CopyTimeline, Counters, Stats, add

# How many waiting storages a stash looks at. What the caller holds for long must not make every stash slow.
_LOOKS = 32


class Follower(Protocol):
    """What is told of the passes of an engine. The engine's lock is held."""

    def begin_backward(self) -> None:
        """The forward is over."""

    def end_backward(self) -> None:
        """The backward is over."""

    def settle(self) -> None:
        """See `Engine.settle`."""


class Engine:
    """Moves tensors of one device with one backend. Threads may share it.

    Args:
        backend: what does the moving.
        depth: the most copies that may be on their way in each direction for what is asked for later; 0 is
            synchronous. Measured times decide how many of them are worth it. Also the most of the tail of a forward
            that stays on the device, since the first loads of backward would bring it right back.
        timeline: where to note copies and waits, or `None`.
    """

    def __init__(self, backend: Backend, *, depth: int = 2, timeline: CopyTimeline | None = None) -> None:
        self.backend = backend
        self.depth = depth
        self.lock = new_lock()
        self._counters = Counters()
        self.transfers = Transfers(backend, self._counters, timeline)
        self.finalized = Finalized(self.lock)
        self.loader = self.new_loader()
        # Weakly: they hold the engine, and what a dropped runtime holds must not wait for the garbage collector.
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._by_storage: dict[int, Entry] = {}  # entries that are on the device, by the address of their storage
        self._waiting: deque[Entry] = deque()  # those of them that may move once nobody else keeps them
        self._tail: deque[Entry] = deque()
        self._leaving: deque[tuple[int, Entry]] = deque()  # each with how many regions had run by then
        self._regions = 0
        self._moved: dict[int, Entry] = {}
        self._count = 0
        self._count_before = 0  # how many moved in the forward before this one
        self._ahead: Ahead[int] = Ahead(depth, guess=lambda ordinal: ordinal - 1)  # by the order of the forward
        self._task = -1
        self._warned = False

    def new_loader(self) -> Loader:
        """What brings bytes of this engine's tiers to its device."""
        return Loader(self.backend, self.transfers)

    def stash(self, tensor: torch.Tensor, *, tier: str = "auto", region: str = "") -> Handle:
        """A handle from which `fetch` makes an equal tensor; the memory of `tensor` is freed if nobody else keeps it.

        Args:
            tensor: a strided tensor of the backend's device.
            tier: the first tier to try, by name, or ``"auto"``.
            region: which saves it, for the statistics.
        """
        with self.lock:
            handle = self._stash(tensor, tier, region)
            self._look()
            self.transfers.pump()
        self.go_on()
        return handle

    def stash_all(self, tensors: Sequence[torch.Tensor], *, tier: str = "auto", region: str = "") -> list[Handle]:
        """The same for several, which are looked at together.

        A tensor that was stashed so before and is as it was only gets another handle: each region of a model may be
        given the same cache, with two tensors of every region before it.
        """
        handles = []
        is_new = False
        with self.lock:
            stream = self.backend.compute_stream()
            for tensor in tensors:
                entry = self._by_storage.get(tensor.untyped_storage()._cdata)
                handle = None if entry is None else entry.handle_of(tensor)
                if handle is None:
                    handle = self._stash(tensor, tier, region)
                    handle.entry.remember(tensor, handle)
                    is_new = True
                elif stream not in handle.entry.streams:
                    handle.entry.streams += (stream,)
                handles.append(handle)
            if is_new:
                self._look()
                self.transfers.pump()
        self.go_on()
        return handles

    def _stash(self, tensor: torch.Tensor, tier: str, region: str) -> Handle:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        record = Record(tensor.detach(), version(tensor))
        entry = self._by_storage.get(key)
        if entry is None or not entry.is_live():  # one that is about to be closed was of another storage there
            entry = Entry(self, key, tier, nbytes, region)
        if (stream := self.backend.compute_stream()) not in entry.streams:
            entry.streams += (stream,)
        handle = Handle.on_new(entry, record)
        if self._by_storage.get(key) is not entry:
            self._by_storage[key] = entry
            self._waiting.append(entry)
        return handle

    def fetch(self, handle: Handle) -> torch.Tensor:
        """The tensor behind `handle`, with its values; it shares memory with other views of its storage.

        Raises:
            CorrectnessError: it was changed in place after it was stashed.
        """
        with self.lock:
            tensor = self._fetch(handle)
            self.transfers.pump()
        self.go_on()
        return tensor

    def look_again(self) -> None:
        """Move what nobody else keeps any more. Called where tensors go out of use: at the end of a region."""
        with self.lock:
            self._regions += 1
            self._look()
            # At the end of a forward nothing follows that would push these out; its peak is yet to come.
            while self._leaving and self._regions - self._leaving[0][0] > self._ahead.depth():
                self._retire_first()
            self.transfers.pump()
        self.go_on()

    def settle(self) -> None:
        """Move all that nobody else keeps by now, and wait until it has arrived. What was loaded ahead goes."""
        with self.lock:
            self._look(len(self._waiting))
            while self._leaving:
                self._retire_first()
            for follower in self.followers:
                follower.settle()
            self.transfers.pump()
        self.go_on()

    def go_on(self) -> None:
        """Called by whoever has held the lock: close what ended meanwhile."""
        self.finalized.collect()

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, brought back by what stands above, which the caller uses from here on. The lock is not held."""
        self.go_on()
        return tensor

    def stats(self) -> Stats:
        """What the engine has done, and what it holds now."""
        self.finalized.collect()
        with self.lock:
            return self._counters.frozen(self.backend.usage())

    # ------------------------------------------------------------------------------------------------------ out

    def _look(self, most: int = _LOOKS) -> None:
        for _ in range(min(len(self._waiting), most)):
            entry = self._waiting.popleft()
            if entry.state is not State.DEVICE or not entry.is_live():
                continue
            if not entry.is_last_keeper():
                self._waiting.append(entry)
                continue
            if entry.ordinal is None:
                entry.ordinal = self._count
                self._count += 1
                self._moved[entry.ordinal] = entry
            depth = self._ahead.depth()
            if depth == 0 or not 0 < self._count_before <= entry.ordinal + depth:
                self._move(entry)
                continue
            self._tail.append(entry)
            self._stays(entry, "tail", entry.nbytes)
            if len(self._tail) > depth:
                self._stays(self._tail[0], "tail", -self._tail[0].nbytes)
                self._move(self._tail.popleft())

    def _move(self, entry: Entry) -> None:
        records = entry.live()
        if entry.state is not State.DEVICE or not records:
            return
        if not entry.is_last_keeper():  # it was in the tail, and backward has it
            self._waiting.append(entry)
            return
        start, stop = hull(records)
        if start == stop:  # views of no elements
            return
        source = records[0].bytes_between(start, stop)
        entry.like = source.new_empty(0)
        entry.buffer = self._allocate(stop - start, entry.tier)
        if entry.buffer is None:
            self._keep(entry)
            return
        # Whatever is interrupted from here on: the entry has its bytes, and `_retire` goes on where this stops.
        self._leaving.append((self._regions, entry))
        entry.base, entry.nbytes, entry.state = source, stop - start, State.LEAVING
        self._counters.met(entry.region, "moved", entry.nbytes)
        del self._by_storage[entry.key]
        for record in records:
            record.move_out(start)
        self._copy_out(entry)
        while len(self._leaving) > self._ahead.depth():
            self._retire_first()

    def _allocate(self, nbytes: int, tier: str) -> Buffer | None:
        buffer = self.backend.allocate(nbytes, tier)
        if buffer is not None:
            self.count_live(buffer.tier, nbytes)
        return buffer

    def _copy_out(self, entry: Entry) -> Copy:
        assert entry.base is not None
        assert entry.buffer is not None
        # The sooner it is out, the sooner its memory is free.
        entry.departure = self.transfers.ask_out(entry.base, entry.buffer, seconds=0.0, owners=entry.streams)
        self.transfers.pump()
        return entry.departure

    def _retire_first(self) -> None:
        """Free the device's memory of the entry that has been on its way out for longest, once its bytes are out."""
        _, entry = self._leaving[0]
        if entry.state is State.LEAVING:
            self._retire(entry)
        self._leaving.popleft()  # only now: what an exception stops is taken up again

    def _retire(self, entry: Entry) -> None:
        departure = entry.departure or self._copy_out(entry)
        event = self.transfers.release(departure)
        while (error := event.error()) is not None:
            if not self._try_below(entry):
                entry.state, entry.departure = State.KEPT, None
                self._keep(entry, error)
                return
            event = self.transfers.release(self._copy_out(entry))
        base = entry.base
        entry.is_gone()
        if base is not None and is_unshared(base):  # backward may have asked for it on its way out
            self.backend.discard(base)

    def _try_below(self, entry: Entry) -> bool:
        """Room on a tier below the one where the copy failed; the bytes are still on the device."""
        assert entry.buffer is not None
        below = self.backend.tiers[self.backend.tiers.index(entry.buffer.tier) + 1 :]
        buffer = self._allocate(entry.nbytes, below[0]) if below else None
        self._free_buffer(entry)
        entry.buffer = buffer
        return buffer is not None

    def _keep(self, entry: Entry, error: BaseException | None = None) -> None:
        if error is not None:
            self._counters.met(entry.region, "moved", -entry.nbytes)
        self._stays(entry, "no room", entry.nbytes)
        self.warn_of(entry.nbytes, error)

    def _stays(self, entry: Entry, why: str, nbytes: int) -> None:
        self._counters.resident_bytes += nbytes
        self._counters.met(entry.region, why, nbytes)

    def left_small(self, region: str, nbytes: int) -> None:
        """Count bytes of storages too small to move that `region` saved."""
        with self.lock:
            self._counters.met(region, "small", nbytes)

    def warn_of(self, nbytes: int, error: BaseException | None = None) -> None:
        """Say once that a tensor stays on the device, since a copy failed, or no tier has room."""
        warned, self._warned = self._warned, True
        if not warned:
            warn_of_staying(nbytes, self.backend.tiers, error)

    def count_live(self, tier: str, nbytes: int) -> None:
        """Count `nbytes` more on `tier`, which may be negative."""
        add(self._counters.live_bytes, tier, nbytes)

    def used_by_host(self, memory: torch.Tensor) -> None:
        """Hear that the host uses memory which a copy has filled: that copy was not in vain. A checker listens."""

    # ------------------------------------------------------------------------------------------------------- in

    def _fetch(self, handle: Handle) -> torch.Tensor:
        entry, record = handle.entry, handle.record
        in_backward = self.follow_backward()  # first of all: a backward that raises is one too
        record.check()
        if record.alias is None and entry.base is None:
            self._load(entry)
        if in_backward and entry.ordinal is not None:
            self._load_ahead(entry.ordinal)
        if record.alias is not None:
            return record.alias
        assert record.layout is not None
        tensor = record.layout.of(self.loader.arrived(entry))
        if in_backward:
            handle.is_fetched()
        if not in_backward or all(record.fetched for record in entry.live()):
            self.loader.let_go(entry)
        return tensor

    def _load(self, entry: Entry, *, seconds: float = 0.0) -> None:
        self.loader.load(entry, started=self._ahead.copied, seconds=seconds)

    def _load_ahead(self, ordinal: int) -> None:
        self._ahead.asked(ordinal, at=self.backend.record())
        for ordinal, seconds in self._ahead.upcoming():
            candidate = self._moved.get(ordinal)
            if candidate is not None and candidate.state is State.AWAY and candidate.live():
                try:
                    self._load(candidate, seconds=seconds)
                except torch.OutOfMemoryError:  # it may well fit once it is needed
                    return

    def follow_backward(self) -> bool:
        """Whether autograd is running backward here; arranges to hear of its end."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if task != self._task:
            self._task = task
            self._ahead.begin()
            for follower in self.followers:
                follower.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return True

    def _end_backward(self) -> None:
        """Give back what was loaded and not asked for: with `retain_graph`, or when the guess was wrong."""
        with self.lock:
            self._task = -1
            for entry in list(self.loader.back):
                self.loader.let_go(entry)
            for follower in self.followers:
                follower.end_backward()
            self.transfers.pump()
        self.go_on()

    def drop(self, entry: Entry) -> None:
        """Called when a handle on `entry` goes. May happen at any moment, inside this engine's own code too."""
        if entry.state is State.DEVICE and entry.records.count(None) < len(entry.records):
            return
        self.finalized.add(entry, self._close)

    def _close(self, entry: Entry) -> None:
        if entry.is_live():
            if entry.state is State.BACK and all(record.fetched for record in entry.live()):
                self.loader.let_go(entry)
            return
        if entry.state is State.DEVICE and entry.ordinal is None:
            self._counters.held_bytes += entry.nbytes
            self._counters.met(entry.region, "held", entry.nbytes)
        if self._by_storage.get(entry.key) is entry:
            del self._by_storage[entry.key]
        try:
            for copy in entry.copies() if entry.base is not None else ():
                self.transfers.no_longer(copy)
        except Exception:  # the bytes on the tier are given back all the same
            self._forget(entry)
            raise
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self.loader.forget(entry)
        if entry.buffer is not None:
            self._free_buffer(entry)
        if entry.ordinal is not None and self._moved.pop(entry.ordinal, None) is not None and not self._moved:
            self._count_before, self._count = self._count, 0
            self._tail.clear()

    def _free_buffer(self, entry: Entry) -> None:
        assert entry.buffer is not None
        self.count_live(entry.buffer.tier, -entry.nbytes)
        buffer, entry.buffer = entry.buffer, None
        self.backend.free(buffer, after=entry.events())
