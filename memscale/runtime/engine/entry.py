"""What the engine remembers of a storage that it was given: the views of it, and where its bytes are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from memscale.core import changed_error, described, found_once, version
from memscale.runtime.backends.protocol import Event
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.loader import ALIGNMENT, Loadable, State


class Layout(NamedTuple):
    """A view of some bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, offset: int | None = None) -> Layout:
        """That of `tensor` in its storage, or with another `offset`."""
        offset = int(tensor.storage_offset()) if offset is None else offset
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The view of the uint8 tensor `base`."""
        elements = base.view(self.dtype)
        tensor = elements.as_strided(self.size, self.stride, elements.storage_offset() + self.offset)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


class Record:
    """One tensor that was stashed: first the tensor itself, cut from its graph; once its bytes moved, its layout."""

    __slots__ = ("alias", "changed", "handles", "layout", "times_back", "unfetched", "version")

    def __init__(self, alias: torch.Tensor, version: int) -> None:
        self.alias: torch.Tensor | None = alias
        self.version = version
        self.layout: Layout | None = None
        self.changed: int | None = None  # the version it had when its bytes left, where that was another one
        # What loaded bytes are kept for. A thread that miscounts makes them go early, or late, and nothing else.
        self.handles = 0
        self.unfetched = 0  # of these, those that have not asked since its bytes last came back
        self.times_back = 0

    @property
    def fetched(self) -> bool:
        """Whether every handle has asked for it since its bytes last came back."""
        return self.unfetched <= 0

    def is_gone(self) -> None:
        """Its bytes are not on the device any more."""
        self.times_back += 1
        self.unfetched = self.handles

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, of which this was made, is on the device as it was then."""
        alias = self.alias
        return (
            alias is not None
            and not tensor.is_inference()
            and tensor._version == self.version
            and tensor.storage_offset() == alias.storage_offset()
            and tensor.size() == alias.size()
            and tensor.stride() == alias.stride()
        )

    def extent(self) -> tuple[int, int]:
        """The first byte of its storage that the tensor covers, and the one after the last."""
        alias = self.alias
        assert alias is not None
        if alias.numel() == 0:
            return 0, 0
        first = int(alias.storage_offset())
        last = first + sum((size - 1) * stride for size, stride in zip(alias.size(), alias.stride(), strict=True))
        return first * alias.element_size(), (last + 1) * alias.element_size()

    def bytes_between(self, start: int, stop: int) -> torch.Tensor:
        """Those bytes of its storage as a uint8 tensor."""
        alias = self.alias
        assert alias is not None
        if alias.is_conj():
            alias = alias.conj()
        if alias.is_neg():
            alias = torch._neg_view(alias)
        elements = alias.untyped_storage().nbytes() // alias.element_size()
        # Detached, since a view keeps the tensor that it was made from.
        return alias.as_strided((elements,), (1,), 0).view(torch.uint8)[start:stop].detach()

    def move_out(self, start: int) -> None:
        """Let go of the tensor; its bytes are those of a base that begins at byte `start` of its storage."""
        alias = self.alias
        assert alias is not None
        offset = int(alias.storage_offset()) - start // alias.element_size() if alias.numel() else 0
        self.layout = Layout.from_tensor(alias, offset)
        # Nobody else can reach the storage now, so this is the last moment at which its version can differ.
        now = version(alias)
        self.changed = now if now != self.version else None
        self.alias = None

    def check(self) -> None:
        """Raise `CorrectnessError` if the tensor was changed in place after it was stashed."""
        alias = self.alias
        if alias is not None and (now := version(alias)) != self.version:
            raise changed_error(kept_tensor(alias.dtype, alias.size()), now, self.version)
        if self.changed is not None:
            assert self.layout is not None
            raise changed_error(kept_tensor(self.layout.dtype, self.layout.size), self.changed, self.version)


class _Ownership:
    """Owns a record, for all of its handles."""

    __slots__ = ("entry", "index")

    def __init__(self, entry: Entry, record: Record) -> None:
        index = len(entry.records)
        self.entry, self.index = entry, index
        entry.records.append(record)  # last: a record without an owner would keep its tensor for good

    def __del__(self) -> None:
        if not hasattr(self, "entry"):  # interrupted before it owned anything
            return
        self.entry.records[self.index] = None  # a tensor that never left is let go of right here
        self.entry.engine.drop(self.entry)


class Handle:
    """Owns a stashed tensor. Dropping the last one of a tensor lets go of its bytes, wherever they are."""

    __slots__ = ("__weakref__", "_fetched", "_ownership", "entry")

    def __init__(self, entry: Entry, ownership: _Ownership) -> None:
        self._ownership, self.entry = ownership, entry
        self._fetched = -1  # how often the bytes had come back when it last asked for them
        record = self.record
        record.handles += 1
        record.unfetched += 1

    @classmethod
    def on_new(cls, entry: Entry, record: Record) -> Handle:
        """The first handle of `record`, which becomes one of `entry`."""
        return cls(entry, _Ownership(entry, record))

    def again(self) -> Handle:
        """Another one of the same record."""
        return Handle(self.entry, self._ownership)

    @property
    def index(self) -> int:
        """The position of its record among those of the entry."""
        return self._ownership.index

    @property
    def record(self) -> Record:
        record = self.entry.records[self._ownership.index]
        assert record is not None, "a record lives as long as its handles"
        return record

    def is_fetched(self) -> None:
        """A backward has asked for its bytes."""
        record = self.record
        if self._fetched != record.times_back:
            self._fetched = record.times_back
            record.unfetched -= 1

    def __del__(self) -> None:
        if not hasattr(self, "_fetched"):  # interrupted before it counted
            return
        record = self.entry.records[self._ownership.index]
        if record is None:  # the garbage collector ends what refers to each other in any order
            return
        record.handles -= 1
        if self._fetched != record.times_back:
            record.unfetched -= 1
        if self.entry.state is State.BACK and record.handles > 0:  # perhaps the others have all asked
            self.entry.engine.drop(self.entry)


class Owner(Protocol):
    """What an entry belongs to: the engine, which stands above this."""

    def fetch(self, handle: Handle) -> torch.Tensor:
        """The tensor behind `handle`."""

    def drop(self, entry: Entry) -> None:
        """Called when a handle on `entry` goes."""


_Known = tuple["weakref.ref[torch.Tensor]", "weakref.ref[Handle]"]


class Entry(Loadable):
    """One storage: the tensors stashed from it, and its bytes."""

    __slots__ = ("departure", "engine", "key", "known", "ordinal", "records", "region", "streams", "tier")

    def __init__(self, engine: Owner, key: int, tier: str, nbytes: int, region: str) -> None:
        super().__init__(nbytes, State.DEVICE)  # bytes of the storage; once moved, of what moved
        self.engine = engine
        self.key = key
        self.tier = tier
        self.region = region
        self.records: list[Record | None] = []
        self.known: dict[int, _Known] = {}
        # The compute streams that it was stashed on: autograd uses it there, so there it was written, and there it may
        # be freed. Whichever stream is current once it moves has seen nothing of that.
        self.streams: tuple[int, ...] = ()
        self.ordinal: int | None = None
        self.departure: Copy | None = None

    def remember(self, tensor: torch.Tensor, handle: Handle) -> None:
        """That `handle` is one of `tensor` itself, for whoever stashes it again."""
        self.known[id(tensor)] = weakref.ref(tensor), weakref.ref(handle)

    def handle_of(self, tensor: torch.Tensor) -> Handle | None:
        """Another handle of a tensor that was stashed and is as it was, or `None`."""
        found = self.known.get(id(tensor))
        # Not of any tensor like it: one over the same memory can have a version counter of its own.
        if found is None or found[0]() is not tensor or (handle := found[1]()) is None:
            return None
        return handle.again() if handle.record.is_of(tensor) else None

    def live(self) -> list[Record]:
        """The records whose handles are alive."""
        return [record for record in self.records if record is not None]

    def is_live(self) -> bool:
        """Whether a handle is alive."""
        return any(self.records)

    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for copy in (self.departure, self.arrival) if copy is not None)

    def written(self) -> list[Event]:
        return [] if self.departure is None else [self.departure.need()]

    def is_gone(self) -> None:
        super().is_gone()
        for record in self.live():
            record.is_gone()

    def is_last_keeper(self) -> bool:
        """Whether nobody but the records here keeps the storage alive: moving it will free its memory."""
        held = self.records.copy()  # while counting: a handle may be dropped in between, and its storage with it
        if not any(held):
            return False
        return _references(self.key) <= len(held) - held.count(None)


def hull(records: Sequence[Record]) -> tuple[int, int]:
    """The bytes of the storage that the records cover together, from an aligned start."""
    extents = [extent for record in records if (extent := record.extent()) != (0, 0)]
    if not extents:
        return 0, 0
    start = min(start for start, _ in extents)
    return start - start % ALIGNMENT, max(stop for _, stop in extents)


def kept_tensor(dtype: torch.dtype, size: torch.Size) -> str:
    """What an error calls a tensor that was saved."""
    return described("a tensor kept by offload()", dtype, size)


def is_unshared(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Whether nothing but `tensor`, and as many others as are known, refers to its storage."""
    return _references(tensor.untyped_storage()._cdata) == 1 + besides


def _references(storage: int) -> int:
    """How many tensors refer to the storage at that address."""
    return int(torch._C._storage_Use_Count(storage)) - _references_of_no_tensor()


@found_once
def _references_of_no_tensor() -> int:
    # Asking for a storage's address makes a Python object, which PyTorch then keeps with the storage; whether that one
    # counts has changed between versions.
    probe = torch.empty(1)
    return int(torch._C._storage_Use_Count(probe.untyped_storage()._cdata)) - 1
