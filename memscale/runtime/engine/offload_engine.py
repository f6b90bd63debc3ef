"""The offload engine: `stash` moves a tensor's bytes to another tier, `fetch` brings them back.

**A storage moves when only handles refer to it.** If a parameter, or a view that the caller holds, keeps the storage
alive, a copy frees nothing. When a tensor is stashed, the operator that made it still refers to it, so the engine
cannot decide yet. The storage waits on the device, and every later stash checks it again: it moves once its handles
hold the only references. From then on nobody else can reach it, so its bytes and its version are final.

**Small storages travel together.** Where the backend says so, storages below `together_bytes` wait until four times as
many bytes or a larger storage were stashed, or the region ends. Those that may move then share one entry: one buffer,
one event in each direction, and one tensor when they come back. Floating-point numbers travel apart from integers and
flags, and arguments of a checkpoint alone: by their values a backward or a recompute may decide, so a simulation
carries them. A few integers, such as a seed, stay.

**Handles own the bytes.** When the last handle on a storage's views is dropped, its bytes are freed on whatever tier
they are. No table of a step's tensors exists that a dropped graph could leave entries in.

**The order is a prediction.** The order in which backward fetches is recorded in the previous backward, and decides
only what is loaded ahead. A wrong prediction costs time, never correctness.

Layers above the engine, such as parameters that live on another tier, use its links and loaders and implement
`Follower` to hear of its passes; the engine does not import them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from memscale.runtime.backends.protocol import ALIGNMENT, Backend, Buffer
from memscale.runtime.engine.entry import Entry, Handle, Moving, Record, bare_references, is_unshared
from memscale.runtime.engine.finalized import Finalized
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.loader import Loader, LoadState
from memscale.runtime.engine.locks import new_lock
from memscale.runtime.engine.prefetch import Prefetch
from memscale.runtime.engine.refusals import warn_of_staying
from memscale.runtime.engine.transfers import Transfers
from memscale.runtime.stats import CopyTimeline, Counters, Stats, add

# How many waiting storages are checked for each stash: those that the caller keeps for long must not slow it down.
_LOOKS = 32
# Small storages travel in groups of up to this many times `together_bytes`: the saved tensors of one block of a small
# model. The host's time for a group is that of a copy; a larger one would stay on the device for longer.
_GROUP = 4
# Integers and flags of fewer bytes stay, such as the seed of a fused attention: their copy would take the host as many
# calls as one of 4 MiB, and free one block of PyTorch's allocator, which has 512 bytes.
_LEAST_INTEGER_BYTES = 512


class Follower(Protocol):
    """Called by an engine at the borders of its passes, with the engine's lock held."""

    def begin_backward(self) -> None:
        """Called when a forward has ended and backward begins."""

    def end_backward(self) -> None:
        """Called when a backward has ended."""

    def settle(self) -> None:
        """See `Engine.settle`."""


class Engine:
    """Moves tensors of one device with one backend. Thread-safe.

    Args:
        backend: the backend that copies.
        depth: the most copies in flight per direction for later requests; 0 makes copies synchronous. Measured times
            decide how many of them are used. It is also the number of a forward's last tensors that stay on the device,
            because backward requests them first.
        timeline: records copies and waits, or None.
    """

    def __init__(self, backend: Backend, *, depth: int = 2, timeline: CopyTimeline | None = None) -> None:
        self.backend = backend
        self.depth = depth
        self.lock = new_lock()
        self.bare_references = bare_references()
        self._together_bytes = backend.together_bytes
        self._unseen = self._unseen_bytes = 0  # tensors stashed since the last look, and the bytes of their storages
        self._is_due = False  # whether the next look is now
        self._counters = Counters()
        self.transfers = Transfers(backend, self._counters, timeline)
        self.finalized = Finalized(self.lock)
        self.loader = self.new_loader()
        # Weak: followers hold the engine, and a dropped runtime has to be freed without the garbage collector.
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._by_storage: dict[int, Entry] = {}  # entries that are on the device, by the address of their storage
        self._waiting: deque[Entry] = deque()  # those that may move once only their handles refer to them
        self._tail: deque[Entry] = deque()
        self._leaving: deque[tuple[int, Entry]] = deque()  # copies out, each with the count of regions at its start
        self._regions = 0
        self._moved: dict[int, Entry] = {}
        self._count = 0
        self._count_before = 0  # how many entries moved in the previous forward
        self._prefetch: Prefetch[int] = Prefetch(depth, guess=self._before)
        self._task = -1
        self._warned = False

    def new_loader(self) -> Loader:
        """Returns a loader from this engine's tiers to its device."""
        return Loader(self.backend, self.transfers)

    def stash(
        self,
        tensor: torch.Tensor,
        *,
        tier: str = "auto",
        region: str = "",
        storage: torch.UntypedStorage | None = None,
    ) -> Handle:
        """Returns a handle from which `fetch` makes an equal tensor; frees the memory of `tensor` if it is unused.

        Args:
            tensor: a strided tensor of the backend's device.
            tier: the first tier to try, by name, or ``"auto"``.
            region: the region that saves the tensor, for the statistics.
            storage: the tensor's storage, if the caller has it: to get it takes a tenth of the time.
        """
        storage = tensor.untyped_storage() if storage is None else storage
        with self.lock:
            handle = self._stash(tensor, storage, tier, region)
            self._note_stash(storage.nbytes())
            if self._is_due:
                self._look()
                self.transfers.pump()
        if self.finalized.items:
            self.go_on()
        return handle

    def stash_all(self, tensors: Sequence[torch.Tensor], *, tier: str = "auto", region: str = "") -> list[Handle]:
        """Stashes several tensors, arguments of a region, and checks the waiting storages once.

        A tensor that was stashed before and is unchanged gets a second handle only: each region of a model may save the
        same KV cache, which has two tensors for every earlier region.
        """
        handles = []
        with self.lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                handle = self._stash(tensor, storage, tier, region)
                handle.entry.is_argument = True
                if handle.record.shares == 1:
                    self._note_stash(storage.nbytes())
                handles.append(handle)
            if self._is_due:
                self._look()
                self.transfers.pump()
        self.go_on()
        return handles

    def _stash(self, tensor: torch.Tensor, storage: torch.UntypedStorage, tier: str, region: str) -> Handle:
        key = storage._cdata
        entry = self._by_storage.get(key)
        if entry is None or not entry.is_live():  # a dead entry belonged to another storage at this address
            has_floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            entry = Entry(self, key, tier, storage.nbytes(), region, has_floats=has_floats)
        if (handle := entry.handle_of(tensor)) is None:
            record = Record(tensor, entry)
            handle = Handle(record)
            entry.records.append(record)  # last: a record without a handle would never free its tensor
            if len(entry.records) == 1:
                self._by_storage[key] = entry
                self._waiting.append(entry)
        if (stream := self.backend.compute_stream()) not in entry.streams:
            entry.streams += (stream,)
        return handle

    def _note_stash(self, nbytes: int) -> None:
        """Counts a stash of a storage of `nbytes`, after which a look may be due."""
        self._unseen += 1
        self._unseen_bytes += nbytes
        if nbytes >= self._together_bytes or self._unseen_bytes >= _GROUP * self._together_bytes:
            self._is_due = True

    def fetch(self, handle: Handle) -> torch.Tensor:
        """Returns the tensor behind `handle`; it shares memory with other fetched views of its storage.

        Raises:
            CorrectnessError: the tensor was changed in place after it was stashed.
        """
        with self.lock:
            tensor = self._fetch(handle)
            self.transfers.pump()
        if self.finalized.items:
            self.go_on()
        return tensor

    def look_again(self) -> None:
        """Moves the storages that only handles refer to now. Called at the end of a region, where tensors are freed."""
        with self.lock:
            self._regions += 1
            depth = self._look()
            # After the last regions of a forward no stash follows that would retire these, and the peak is still to
            # come.
            while self._leaving and self._regions - self._leaving[0][0] > depth:
                self._retire_first()
            self.transfers.pump()
        self.go_on()

    def settle(self) -> None:
        """Moves all storages that only handles refer to, waits for all copies out, and drops what was loaded ahead."""
        with self.lock:
            self._look(len(self._waiting))
            while self._leaving:
                self._retire_first()
            for follower in self.followers:
                follower.settle()
            self.transfers.pump()
        self.go_on()

    def go_on(self) -> None:
        """Called after each release of the lock: closes entries that finalizers have queued meanwhile."""
        self.finalized.collect()

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, which a follower has loaded for the caller. The lock is not held."""
        self.go_on()
        return tensor

    def stats(self) -> Stats:
        """Returns what the engine has moved, and what its tiers hold now."""
        self.finalized.collect()
        with self.lock:
            return self._counters.frozen(self.backend.usage())

    # ------------------------------------------------------------------------------------------------------ copies out

    def _look(self, most: int = 0) -> int:
        """Moves those of the `most` oldest waiting storages that may move; returns the depth of the prefetch."""
        most = most or _LOOKS * max(1, self._unseen)
        self._unseen = self._unseen_bytes = 0
        self._is_due = False
        depth = self._prefetch.depth()
        ready: list[Entry] = []
        for _ in range(min(len(self._waiting), most)):
            entry = self._waiting.popleft()
            if entry.state is not LoadState.DEVICE:
                continue
            if not entry.is_last_keeper():
                if entry.is_live():
                    self._waiting.append(entry)
                continue
            if not entry.ordinals:
                entry.ordinals = (self._count,)
                self._moved[self._count] = entry
                self._count += 1
            if depth == 0 or not 0 < self._count_before <= entry.ordinals[0] + depth:
                ready.append(entry)
                continue
            self._tail.append(entry)
            self._stays(entry.region, "tail", entry.nbytes)
            if len(self._tail) > depth:
                oldest = self._tail.popleft()
                self._stays(oldest.region, "tail", -oldest.nbytes)
                if oldest.state is LoadState.DEVICE and oldest.is_last_keeper():
                    ready.append(oldest)
                elif oldest.is_live():  # backward has fetched it from the tail
                    self._waiting.append(oldest)
        for together in self._together(ready):
            self._move(together, depth)
        return depth

    def _together(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Returns `entries` in groups that travel as one: of small storages that are alike."""
        groups: list[list[Entry]] = []
        filling: dict[Hashable, tuple[list[Entry], int]] = {}  # the last group of each kind, and its bytes
        for entry in entries:
            nbytes = entry.nbytes + ALIGNMENT
            if nbytes > self._together_bytes or entry.is_argument:
                groups.append([entry])
                continue
            kind = entry.tier, entry.streams, entry.has_floats
            group, before = filling.get(kind, ([], 0))
            if not group or before + nbytes > _GROUP * self._together_bytes:
                group, before = [], 0
                groups.append(group)
            group.append(entry)
            filling[kind] = group, before + nbytes
        return groups

    def _move(self, entries: Sequence[Entry], depth: int) -> None:
        nbytes = sum(entry.nbytes for entry in entries)
        if self._together_bytes and nbytes < _LEAST_INTEGER_BYTES and not entries[0].has_floats:
            self._counters.met(entries[0].region, "small", nbytes)
            return
        entry = self._take_out(entries)
        if entry is None:
            return
        self._copy_out(entry)
        while len(self._leaving) > depth:
            self._retire_first()

    def _take_out(self, entries: Sequence[Entry]) -> Entry | None:
        """Allocates a buffer for `entries` and moves them to the first of them, which owns their bytes from now on."""
        moving: list[Moving] = []
        nbytes = 0
        as_is = len(entries) > 1
        for entry in entries:
            if (part := entry.part(nbytes, as_is=as_is)) is not None:
                moving.append(part)
                _, _, source, _, start = part
                nbytes = start + source.nbytes
        if not moving:
            return None
        into, _, source, _, _ = moving[0]
        into.like = source.new_empty(0, dtype=torch.uint8)
        into.buffer = self._allocate(nbytes, into.tier)
        if into.buffer is None:
            for entry, *_ in moving:
                self._keep(entry)
            return None
        # After an exception from here on the entry still has its bytes, and `_retire` resumes.
        self._leaving.append((self._regions, into))
        into.sources = [source for _, _, source, _, _ in moving]
        into.nbytes, into.state = nbytes, LoadState.LEAVING
        into.ordinals = sum([entry.ordinals for entry, *_ in moving], ())
        into.moved_bytes = moved_bytes = dict[str, int]()
        ends = [start for *_, start in moving[1:]] + [nbytes]
        for index, (part, end) in enumerate(zip(moving, ends, strict=True)):
            entry, aliases, _, _, start = part
            moved_bytes[entry.region] = moved_bytes.get(entry.region, 0) + end - start
            del self._by_storage[entry.key]
            if entry is not into:
                entry.into, entry.state = into, LoadState.LEAVING
                into.records += entry.records
                for ordinal in entry.ordinals:
                    self._moved[ordinal] = into
            for record, alias in aliases:
                record.move_out(alias, into, part, index)
        for region, nbytes in moved_bytes.items():
            self._counters.met(region, "moved", nbytes)
        return into

    def _allocate(self, nbytes: int, tier: str) -> Buffer | None:
        buffer = self.backend.allocate(nbytes, tier)
        if buffer is not None:
            self.count_live(buffer.tier, nbytes)
        return buffer

    def _copy_out(self, entry: Entry) -> Copy:
        assert entry.buffer is not None
        # Deadline 0: an early copy frees memory early.
        entry.departure = self.transfers.ask_out(entry.sources, entry.buffer, seconds=0.0, owners=entry.streams)
        self.transfers.pump()
        return entry.departure

    def _retire_first(self) -> None:
        """Frees the device memory of the oldest copy out, after the copy."""
        _, entry = self._leaving[0]
        if entry.state is LoadState.LEAVING:
            self._retire(entry)
        self._leaving.popleft()  # last, so that an exception leaves the entry in the queue

    def _retire(self, entry: Entry) -> None:
        departure = entry.departure or self._copy_out(entry)
        event = self.transfers.release(departure)
        while (error := event.error()) is not None:
            if not self._try_below(entry):
                entry.state, entry.departure = LoadState.KEPT, None
                self._keep(entry, error)
                return
            event = self.transfers.release(self._copy_out(entry))
        sources = entry.sources
        entry.is_gone()
        for source in sources:
            if is_unshared(source):  # backward may have fetched it during the copy out
                self.backend.discard(source)

    def _try_below(self, entry: Entry) -> bool:
        """Allocates on a tier below the one whose copy failed; the bytes are still on the device."""
        assert entry.buffer is not None
        below = self.backend.tiers[self.backend.tiers.index(entry.buffer.tier) + 1 :]
        buffer = self._allocate(entry.nbytes, below[0]) if below else None
        self._free_buffer(entry)
        entry.buffer = buffer
        return buffer is not None

    def _keep(self, entry: Entry, error: BaseException | None = None) -> None:
        for region, nbytes in entry.moved_bytes.items():
            self._counters.met(region, "moved", -nbytes)
        for region, nbytes in (entry.moved_bytes or {entry.region: entry.nbytes}).items():
            self._stays(region, "no room", nbytes)
        self.warn_of(entry.nbytes, error)

    def _stays(self, region: str, why: str, nbytes: int) -> None:
        self._counters.resident_bytes += nbytes
        self._counters.met(region, why, nbytes)

    def left_small(self, region: str, nbytes: int) -> None:
        """Counts bytes of storages below `min_bytes` that `region` saved."""
        with self.lock:
            self._counters.met(region, "small", nbytes)

    def warn_of(self, nbytes: int, error: BaseException | None = None) -> None:
        """Warns once that a tensor stays on the device because a copy failed or no tier has room."""
        warned, self._warned = self._warned, True
        if not warned:
            warn_of_staying(nbytes, self.backend.tiers, error)

    def count_live(self, tier: str, nbytes: int) -> None:
        """Adds `nbytes`, which may be negative, to the live bytes of `tier`."""
        add(self._counters.live_bytes, tier, nbytes)

    def used_by_host(self, memory: torch.Tensor) -> None:
        """Called when the host uses memory that a copy has filled; a hook for the checker in tests."""

    # ------------------------------------------------------------------------------------------------------- copies in

    def _fetch(self, handle: Handle) -> torch.Tensor:
        record = handle.record
        entry = record.entry
        in_backward = self.follow_backward()  # first: a backward that raises has to end as well
        if record.alias is not None or record.changed is not None:
            record.check()
        if record.alias is None and entry.base is None and not entry.sources:
            self._load(entry)
        if in_backward and entry.ordinals and entry.ordinals[0] not in self._prefetch.passed:
            self._load_ahead(entry.ordinals[0])
        if record.alias is not None:
            return record.alias
        assert record.layout is not None
        if entry.sources:  # the copy out has not ended
            source = entry.sources[record.part]
            tensor = source.detach() if record.is_source else record.layout.of(source, record.start)
        else:
            self.loader.arrived(entry)
            tensor = record.layout.of(entry.elements(record.layout.dtype))
        if in_backward:
            record.unfetched -= 1
        if not in_backward or entry.is_fetched():
            self.loader.let_go(entry)
        return tensor

    def _load(self, entry: Entry, *, seconds: float = 0.0) -> None:
        self.loader.load(entry, started=self._prefetch.copied, seconds=seconds)

    def _load_ahead(self, ordinal: int) -> None:
        self._prefetch.requested(ordinal, at=self.backend.record())
        for ordinal, seconds in self._prefetch.upcoming():
            candidate = self._moved.get(ordinal)
            if candidate is not None and candidate.state is LoadState.OFFLOADED and candidate.is_live():
                try:
                    self._load(candidate, seconds=seconds)
                except torch.OutOfMemoryError:  # loaded when requested, when it may fit
                    return

    def _before(self, ordinal: int) -> int:
        """Returns the first guess of what backward requests after `ordinal`: what could move before it."""
        entry = self._moved.get(ordinal - 1)
        return entry.ordinals[0] if entry is not None else ordinal - 1

    def follow_backward(self) -> bool:
        """Returns whether autograd runs backward in this thread, and registers `_end_backward` once per backward."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if task != self._task:
            self._task = task
            self._prefetch.begin()
            for follower in self.followers:
                follower.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return True

    def _end_backward(self) -> None:
        """Drops what was loaded and not fetched: with `retain_graph`, or after a wrong prediction."""
        with self.lock:
            self._task = -1
            for entry in list(self.loader.back):
                self.loader.let_go(entry)
            for follower in self.followers:
                follower.end_backward()
            self.transfers.pump()
        self.go_on()

    def drop(self, entry: Entry) -> None:
        """Called when a handle on `entry` is dropped; this may happen inside the engine's own code."""
        if entry.is_live() and (entry.state is not LoadState.BACK or not entry.is_fetched()):
            return
        self.finalized.add(entry, self._close)

    def _close(self, entry: Entry) -> None:
        entry = entry.into or entry
        if entry.is_live():
            if entry.state is LoadState.BACK and entry.is_fetched():
                self.loader.let_go(entry)
            return
        if entry.state is LoadState.DEVICE and not entry.ordinals:
            self._counters.held_bytes += entry.nbytes
            self._counters.met(entry.region, "held", entry.nbytes)
        if self._by_storage.get(entry.key) is entry:
            del self._by_storage[entry.key]
        try:
            for copy in entry.copies() if entry.is_on_device() else ():
                self.transfers.no_longer(copy)
        finally:  # free the bytes on the tier even after an error
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self.loader.forget(entry)
        entry.records = []  # records refer to their entry: without a cycle no garbage collector is needed
        if entry.buffer is not None:
            self._free_buffer(entry)
        were_known = [self._moved.pop(ordinal, None) is not None for ordinal in entry.ordinals]
        if any(were_known) and not self._moved:
            self._count_before, self._count = self._count, 0
            self._tail.clear()

    def _free_buffer(self, entry: Entry) -> None:
        assert entry.buffer is not None
        self.count_live(entry.buffer.tier, -entry.nbytes)
        buffer, entry.buffer = entry.buffer, None
        self.backend.free(buffer, after=entry.events())
