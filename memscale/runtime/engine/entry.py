"""`Entry`, `Record` and `Handle`: the engine's data about a stashed storage, its views, and where its bytes are."""

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
    """The dtype, shape and strides of a view, and its offset in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, offset: int | None = None) -> Layout:
        """Returns the layout of `tensor` in its storage, or with another `offset` in elements."""
        offset = int(tensor.storage_offset()) if offset is None else offset
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the view of the uint8 tensor `base` with this layout."""
        elements = base.view(self.dtype)
        tensor = elements.as_strided(self.size, self.stride, elements.storage_offset() + self.offset)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


class Record:
    """A stashed tensor: a detached alias while the bytes are on the device, the layout after the move."""

    __slots__ = ("alias", "changed", "handles", "layout", "times_back", "unfetched", "version")

    def __init__(self, alias: torch.Tensor, version: int) -> None:
        self.alias: torch.Tensor | None = alias
        self.version = version
        self.layout: Layout | None = None
        self.changed: int | None = None  # the version when the bytes moved, if it differs from `version`
        # These counts decide how long loaded bytes stay. A race between threads only makes them go early or late.
        self.handles = 0
        self.unfetched = 0  # handles that have not fetched since the bytes last came back
        self.times_back = 0

    @property
    def fetched(self) -> bool:
        """Whether every handle has fetched since the bytes last came back."""
        return self.unfetched <= 0

    def is_gone(self) -> None:
        """Called when the bytes leave the device."""
        self.times_back += 1
        self.unfetched = self.handles

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, of which this record was made, is on the device and unchanged."""
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
        """Returns the first byte of the storage that the tensor covers, and the byte after the last."""
        alias = self.alias
        assert alias is not None
        if alias.numel() == 0:
            return 0, 0
        first = int(alias.storage_offset())
        last = first + sum((size - 1) * stride for size, stride in zip(alias.size(), alias.stride(), strict=True))
        return first * alias.element_size(), (last + 1) * alias.element_size()

    def bytes_between(self, start: int, stop: int) -> torch.Tensor:
        """Returns bytes `start` to `stop` of the storage as a uint8 tensor."""
        alias = self.alias
        assert alias is not None
        if alias.is_conj():
            alias = alias.conj()
        if alias.is_neg():
            alias = torch._neg_view(alias)
        elements = alias.untyped_storage().nbytes() // alias.element_size()
        # Detached, because a view keeps a reference to its base.
        return alias.as_strided((elements,), (1,), 0).view(torch.uint8)[start:stop].detach()

    def move_out(self, start: int) -> None:
        """Drops the alias and keeps its layout, relative to byte `start` of the storage."""
        alias = self.alias
        assert alias is not None
        offset = int(alias.storage_offset()) - start // alias.element_size() if alias.numel() else 0
        self.layout = Layout.from_tensor(alias, offset)
        # From here on nobody else can reach the storage, so the version read now is final.
        now = version(alias)
        self.changed = now if now != self.version else None
        self.alias = None

    def check(self) -> None:
        """Raises `CorrectnessError` if the tensor was changed in place after it was stashed."""
        alias = self.alias
        if alias is not None and (now := version(alias)) != self.version:
            raise changed_error(kept_tensor(alias.dtype, alias.size()), now, self.version)
        if self.changed is not None:
            assert self.layout is not None
            raise changed_error(kept_tensor(self.layout.dtype, self.layout.size), self.changed, self.version)


class _Ownership:
    """Owns a record, on behalf of all its handles."""

    __slots__ = ("entry", "index")

    def __init__(self, entry: Entry, record: Record) -> None:
        index = len(entry.records)
        self.entry, self.index = entry, index
        entry.records.append(record)  # last: a record without an owner would never free its tensor

    def __del__(self) -> None:
        if not hasattr(self, "entry"):  # the constructor was interrupted
            return
        self.entry.records[self.index] = None  # frees a tensor that never left the device
        self.entry.engine.drop(self.entry)


class Handle:
    """Owns a stashed tensor; dropping the last handle of a tensor frees its bytes on any tier."""

    __slots__ = ("__weakref__", "_fetched", "_ownership", "entry")

    def __init__(self, entry: Entry, ownership: _Ownership) -> None:
        self._ownership, self.entry = ownership, entry
        self._fetched = -1  # the record's `times_back` at this handle's last fetch
        record = self.record
        record.handles += 1
        record.unfetched += 1

    @classmethod
    def on_new(cls, entry: Entry, record: Record) -> Handle:
        """Returns the first handle of `record`, and adds the record to `entry`."""
        return cls(entry, _Ownership(entry, record))

    def again(self) -> Handle:
        """Returns another handle of the same record."""
        return Handle(self.entry, self._ownership)

    @property
    def index(self) -> int:
        """The index of the record in `entry.records`."""
        return self._ownership.index

    @property
    def record(self) -> Record:
        record = self.entry.records[self._ownership.index]
        assert record is not None, "a record lives as long as its handles"
        return record

    def is_fetched(self) -> None:
        """Called when a backward has fetched through this handle."""
        record = self.record
        if self._fetched != record.times_back:
            self._fetched = record.times_back
            record.unfetched -= 1

    def __del__(self) -> None:
        if not hasattr(self, "_fetched"):  # the constructor was interrupted
            return
        record = self.entry.records[self._ownership.index]
        if record is None:  # the garbage collector may finalize objects of a cycle in any order
            return
        record.handles -= 1
        if self._fetched != record.times_back:
            record.unfetched -= 1
        if self.entry.state is State.BACK and record.handles > 0:  # the remaining handles may all have fetched
            self.entry.engine.drop(self.entry)


class Owner(Protocol):
    """The interface of the engine that an entry needs."""

    def fetch(self, handle: Handle) -> torch.Tensor:
        """Returns the tensor behind `handle`."""

    def drop(self, entry: Entry) -> None:
        """Called when a handle on `entry` is dropped."""


_Known = tuple["weakref.ref[torch.Tensor]", "weakref.ref[Handle]"]


class Entry(Loadable):
    """A stashed storage: the records of its views, and the place of its bytes."""

    __slots__ = ("departure", "engine", "key", "known", "ordinal", "records", "region", "streams", "tier")

    def __init__(self, engine: Owner, key: int, tier: str, nbytes: int, region: str) -> None:
        super().__init__(nbytes, State.DEVICE)  # nbytes: of the storage, and after the move of the moved bytes
        self.engine = engine
        self.key = key
        self.tier = tier
        self.region = region
        self.records: list[Record | None] = []
        self.known: dict[int, _Known] = {}
        # The compute streams on which it was stashed. Autograd uses and frees the tensor there; the stream that is
        # current when the storage moves may be another one.
        self.streams: tuple[int, ...] = ()
        self.ordinal: int | None = None
        self.departure: Copy | None = None

    def remember(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Records that `handle` belongs to `tensor`, for later stashes of the same tensor object."""
        self.known[id(tensor)] = weakref.ref(tensor), weakref.ref(handle)

    def handle_of(self, tensor: torch.Tensor) -> Handle | None:
        """Returns a new handle of `tensor` if it was stashed before and is unchanged, else None."""
        found = self.known.get(id(tensor))
        # By object identity: another tensor over the same memory can have a version counter of its own.
        if found is None or found[0]() is not tensor or (handle := found[1]()) is None:
            return None
        return handle.again() if handle.record.is_of(tensor) else None

    def live(self) -> list[Record]:
        """Returns the records with live handles."""
        return [record for record in self.records if record is not None]

    def is_live(self) -> bool:
        """Whether any handle is alive."""
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
        """Whether only the records here refer to the storage, so that moving it frees its memory."""
        held = self.records.copy()  # a handle may be dropped during the count
        if not any(held):
            return False
        return _references(self.key) <= len(held) - held.count(None)


def hull(records: Sequence[Record]) -> tuple[int, int]:
    """Returns the first and last-plus-one byte of the storage that the records cover, from an aligned start."""
    extents = [extent for record in records if (extent := record.extent()) != (0, 0)]
    if not extents:
        return 0, 0
    start = min(start for start, _ in extents)
    return start - start % ALIGNMENT, max(stop for _, stop in extents)


def kept_tensor(dtype: torch.dtype, size: torch.Size) -> str:
    """Returns the words by which errors name a tensor that `offload` saved."""
    return described("a tensor kept by offload()", dtype, size)


def is_unshared(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Whether only `tensor`, and `besides` other known tensors, refer to its storage."""
    return _references(tensor.untyped_storage()._cdata) == 1 + besides


def _references(storage: int) -> int:
    """Returns how many tensors refer to the storage at that address."""
    return int(torch._C._storage_Use_Count(storage)) - _references_of_no_tensor()


@found_once
def _references_of_no_tensor() -> int:
    # Reading a storage's address makes a Python object that PyTorch keeps with the storage; whether that object counts
    # as a reference differs between versions of PyTorch.
    probe = torch.empty(1)
    return int(torch._C._storage_Use_Count(probe.untyped_storage()._cdata)) - 1
