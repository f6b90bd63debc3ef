"""`Entry`, `Record` and `Handle`: the engine's data about stashed storages, their views, and where the bytes are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from memscale.core import changed_error, described, found_once, version
from memscale.runtime.backends.protocol import ALIGNMENT, Event
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.loader import Loadable, LoadState


class Layout(NamedTuple):
    """The dtype, shape and strides of a view, and its offset in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, offset: int | None = None) -> Layout:
        """Returns the layout of `tensor` in its storage, or with another `offset` in elements."""
        offset = int(tensor.storage_offset()) if offset is None else offset
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def of(self, base: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Returns the view with this layout of `base`, bytes that begin at byte `start` of those that are laid out."""
        elements = base if base.dtype is self.dtype else base.view(self.dtype)
        first = int(elements.storage_offset()) + self.offset - start // self.dtype.itemsize
        tensor = elements.as_strided(self.size, self.stride, first)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


class Record:
    """A stashed tensor: a detached alias while its bytes are where they were, its layout after they have moved.

    Attributes:
        alias: None once the bytes have moved, or the handle was dropped.
        changed: the version when the bytes moved, if it differs from `version`.
        entry: the bytes; set again when the bytes move together with those of other storages.
        layout: of the tensor within the bytes of the entry.
        part: the index of these bytes in `Entry.sources`.
        start: their first byte in the entry.
        is_source: whether that source is the tensor itself.
        shares: how many times the handle was given out.
        unfetched: how many of these have not been fetched since the bytes last came back. Decides how long loaded
            bytes stay; a race between threads only makes them go early or late.
    """

    is_dropped = is_source = False
    layout: Layout | None = None
    changed: int | None = None
    part = start = 0
    shares = unfetched = 1

    def __init__(self, tensor: torch.Tensor, entry: Entry) -> None:
        self.alias: torch.Tensor | None = tensor.detach()
        self.version = version(tensor)
        self.entry = entry
        self.handle: weakref.ref[Handle] | None = None  # set by the handle
        self._origin = weakref.ref(_counted_with(tensor))

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the record also holds for `tensor`: the same bytes in the same layout, unchanged since."""
        alias = self.alias
        return (
            alias is not None
            # Another tensor over the same memory, such as `.data`, may have a version counter of its own.
            and self._origin() is _counted_with(tensor)
            and version(tensor) == self.version >= 0
            # What `Layout` has, without two of them: their construction takes twice the time of the comparison.
            and tensor.dtype is alias.dtype
            and tensor.storage_offset() == alias.storage_offset()
            and tensor.size() == alias.size()
            and tensor.stride() == alias.stride()
            and tensor.is_conj() == alias.is_conj()
            and tensor.is_neg() == alias.is_neg()
        )

    def move_out(self, alias: torch.Tensor, into: Entry, part: Moving, index: int) -> None:
        """Drops the alias and keeps its layout in `part`, which is number `index` of the entry `into`."""
        _, _, source, first, start = part
        self.is_source = alias is source
        if self.is_source:  # its bytes begin with its first element, and it is neither conjugate nor negative
            self.layout = Layout(alias.dtype, alias.size(), alias.stride(), start // alias.dtype.itemsize)
        else:
            offset = int(alias.storage_offset()) + (start - first) // alias.dtype.itemsize
            self.layout = Layout.from_tensor(alias, offset)
        # From here on nobody else can reach the storage, so the version read now is final.
        now = alias._version if self.version >= 0 else -1
        self.changed = now if now != self.version else None
        self.part, self.start, self.entry = index, start, into
        self.alias = None

    def check(self) -> None:
        """Raises `CorrectnessError` if the tensor was changed in place after it was stashed."""
        alias = self.alias
        # An inference tensor counts no versions, but PyTorch lets an alias of one count, from 0.
        if alias is not None and self.version >= 0 and (now := version(alias)) != self.version:
            raise changed_error(kept_tensor(alias.dtype, alias.size()), now, self.version)
        if self.changed is not None:
            assert self.layout is not None
            raise changed_error(kept_tensor(self.layout.dtype, self.layout.size), self.changed, self.version)


def _counted_with(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor whose version counter `tensor` has: that of which it is a view, or itself."""
    base = tensor._base
    return tensor if base is None else base


class Handle:
    """Owns a stashed tensor; when the last reference to it is dropped, its bytes are freed on any tier."""

    __slots__ = ("__weakref__", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        record.handle = weakref.ref(self)

    @property
    def entry(self) -> Entry:
        """The bytes of the tensor, and their place."""
        return self.record.entry

    def again(self) -> Handle:
        """Returns this handle, for a second owner."""
        self.record.shares += 1
        self.record.unfetched += 1
        return self

    def __del__(self) -> None:
        try:
            record = self.record
        except AttributeError:  # the constructor was interrupted
            return
        record.is_dropped = True
        record.alias = None  # frees a tensor that never left the device
        record.entry.engine.drop(record.entry)


class Owner(Protocol):
    """The interface of the engine that an entry needs."""

    bare_references: int
    """What PyTorch counts as references to a storage without a tensor."""

    def fetch(self, handle: Handle) -> torch.Tensor:
        """Returns the tensor behind `handle`."""

    def drop(self, entry: Entry) -> None:
        """Called when a handle on `entry` is dropped."""


class Entry(Loadable):
    """Bytes that move as one: of a stashed storage, or of several small ones from their move on.

    Attributes:
        key: the address of the storage, before the move.
        records: of the views.
        ordinals: the numbers of the storages in the order in which they could move; empty until then.
        sources: the bytes of each storage on the device, during the copy out or if it failed.
        moved_bytes: of the storages that each region saved.
        has_floats: whether the storage holds floating-point or complex numbers, rather than integers or flags.
        is_argument: whether a recompute of a checkpoint gets the tensor.
        into: the entry that took over the storage of this one.
    """

    # The compute streams on which it was stashed. Autograd uses and frees the tensor there; the stream that is current
    # when the storage moves may be another one.
    streams: tuple[int, ...] = ()
    ordinals: tuple[int, ...] = ()
    is_argument = False
    sources: Sequence[torch.Tensor] = ()
    moved_bytes: Mapping[str, int] = MappingProxyType({})
    departure: Copy | None = None
    into: Entry | None = None

    def __init__(self, engine: Owner, key: int, tier: str, nbytes: int, region: str, *, has_floats: bool) -> None:
        self.nbytes, self.state = nbytes, LoadState.DEVICE  # bytes of the storage; after the move, the moved bytes
        self.engine = engine
        self.key = key
        self.tier = tier
        self.region = region
        self.has_floats = has_floats
        self.records: list[Record] = []
        self._elements: dict[torch.dtype, torch.Tensor] = {}

    def handle_of(self, tensor: torch.Tensor) -> Handle | None:
        """Returns a handle of these bytes in the layout of `tensor`, once more, if one is alive; else None."""
        for record in self.records:
            if record.is_of(tensor) and record.handle is not None and (handle := record.handle()) is not None:
                return handle.again()
        return None

    def is_live(self) -> bool:
        """Whether any handle is alive."""
        for record in self.records:  # noqa: SIM110 - a generator would double the time, for every tensor that is dropped
            if not record.is_dropped:
                return True
        return False

    def is_fetched(self) -> bool:
        """Whether every live handle was fetched since the bytes last came back."""
        for record in self.records:  # noqa: SIM110 - likewise
            if record.unfetched > 0 and not record.is_dropped:
                return False
        return True

    def is_on_device(self) -> bool:
        """Whether the moved bytes are on the device too, or about to be."""
        return self.base is not None or bool(self.sources)

    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for copy in (self.departure, self.arrival) if copy is not None)

    def written(self) -> list[Event]:
        return [] if self.departure is None else [self.departure.need()]

    def is_moving(self) -> bool:
        entry = self.into or self
        return entry.is_on_device() and any(copy.is_under_way() for copy in entry.copies())

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes on the device as a tensor of `dtype`, made once for all views of that dtype."""
        assert self.base is not None
        if (found := self._elements.get(dtype)) is None:
            found = self._elements[dtype] = self.base.view(dtype)
        return found

    def is_gone(self) -> None:
        super().is_gone()
        self.sources = ()
        self._elements = {}
        for record in self.records:
            record.unfetched = record.shares

    def aliases(self) -> list[tuple[Record, torch.Tensor]]:
        """Returns the live records with their tensors, before the move."""
        return [(record, alias) for record in self.records if (alias := record.alias) is not None]

    def is_last_keeper(self) -> bool:
        """Whether only the records here refer to the storage, so that moving it frees its memory."""
        held = [alias for record in self.records if (alias := record.alias) is not None]  # kept during the count
        return bool(held) and torch._C._storage_Use_Count(self.key) <= len(held) + self.engine.bare_references

    def part(self, behind: int, *, as_is: bool) -> Moving | None:
        """Returns the bytes that the records cover, to go behind byte `behind` of an entry; None if there are none.

        With `as_is` the bytes may be given as a tensor of any dtype that is one piece of memory from its first element
        on, which takes a third of the time.
        """
        aliases = self.aliases()
        start = behind + -behind % ALIGNMENT
        if as_is and len(aliases) == 1:  # the usual case, in a third of the time
            alias = aliases[0][1]
            if _is_one_piece(alias) and not (alias.storage_offset() or alias.is_conj() or alias.is_neg()):
                return (self, aliases, alias, 0, start) if alias.numel() else None
        first, stop, whole = -1, 0, None
        for _, alias in aliases:
            begin, end = _extent(alias)
            if begin == end:
                continue
            if begin == 0 and end > stop and alias.is_contiguous() and not (alias.is_conj() or alias.is_neg()):
                whole = alias  # if none of the others reaches further
            first, stop = begin if first < 0 else min(first, begin), max(stop, end)
        if first < 0:
            return None
        if as_is and whole is not None and whole.nbytes == stop:
            return self, aliases, whole, 0, start
        first -= first % ALIGNMENT
        return self, aliases, _bytes_between(aliases[0][1], first, stop), first, start


# The bytes of one storage that travel in an entry: the storage's own entry, the records of its views, each with its
# tensor; the bytes; their first byte in the storage, and in the entry. A tuple, since a class with names would take a
# tenth of the time that a small storage takes to move.
Moving = tuple[Entry, list[tuple[Record, torch.Tensor]], torch.Tensor, int, int]


def _is_one_piece(tensor: torch.Tensor) -> bool:
    """Whether `tensor`, in whatever order, has all bytes from its first element on; integers in order only."""
    # The simulation carries the values of integers, and reads them in the order of the tensor.
    return tensor.is_contiguous() or (tensor.dtype.is_floating_point and _spans(tensor) == tensor.nbytes)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of the storage that `tensor` covers, and the byte after the last."""
    first, nbytes = int(tensor.storage_offset()), tensor.dtype.itemsize
    if tensor.is_contiguous():
        return first * nbytes, first * nbytes + tensor.nbytes
    return (first * nbytes, first * nbytes + _spans(tensor)) if tensor.numel() else (0, 0)


def _spans(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first element of `tensor` to the end of the one that is last in memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _bytes_between(alias: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns bytes `start` to `stop` of the storage of `alias` as a uint8 tensor."""
    if alias.is_conj():
        alias = alias.conj()
    if alias.is_neg():
        alias = torch._neg_view(alias)
    nbytes = alias.untyped_storage().nbytes()
    whole = alias.as_strided((nbytes // alias.element_size(),), (1,), 0).view(torch.uint8)
    # Detached, because a view keeps a reference to its base.
    return (whole if stop - start == nbytes else whole[start:stop]).detach()


def kept_tensor(dtype: torch.dtype, size: torch.Size) -> str:
    """Returns the words by which errors name a tensor that `offload` saved."""
    return described("a tensor kept by offload()", dtype, size)


def is_unshared(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Whether only `tensor`, and `besides` other known tensors, refer to its storage."""
    count = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return count - bare_references() == 1 + besides


@found_once
def bare_references() -> int:
    """Returns what PyTorch counts as references to a storage without a tensor."""
    # Reading a storage's address makes a Python object that PyTorch keeps with the storage; whether that object counts
    # as a reference differs between versions of PyTorch.
    probe = torch.empty(1)
    return int(torch._C._storage_Use_Count(probe.untyped_storage()._cdata)) - 1
