"""What the engine remembers of a storage that it was given: the views of it, and where its bytes are."""

from __future__ import annotations

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

    __slots__ = ("alias", "changed", "fetched", "layout", "version")

    def __init__(self, alias: torch.Tensor, version: int) -> None:
        self.alias: torch.Tensor | None = alias
        self.version = version
        self.layout: Layout | None = None
        self.changed: int | None = None  # the version it had when its bytes left, where that was another one
        self.fetched = False  # since its bytes last came back

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


class Handle:
    """Owns a stashed tensor. Dropping it lets go of the tensor's bytes, wherever they are."""

    __slots__ = ("entry", "index")

    def __init__(self, entry: Entry, record: Record) -> None:
        index = len(entry.records)
        self.entry, self.index = entry, index
        entry.records.append(record)  # last: a record without a handle would keep its tensor for good

    @property
    def record(self) -> Record:
        record = self.entry.records[self.index]
        assert record is not None, "a record lives as long as its handle"
        return record

    def __del__(self) -> None:
        if not hasattr(self, "entry"):  # interrupted before it owned anything
            return
        self.entry.records[self.index] = None  # a tensor that never left is let go of right here
        self.entry.engine.drop(self.entry)


class Owner(Protocol):
    """What an entry belongs to: the engine, which stands above this."""

    def fetch(self, handle: Handle) -> torch.Tensor:
        """The tensor behind `handle`."""

    def drop(self, entry: Entry) -> None:
        """Called when a handle on `entry` goes."""


class Entry(Loadable):
    """One storage: the tensors stashed from it, and its bytes."""

    __slots__ = ("departure", "engine", "key", "ordinal", "records", "region", "streams", "tier")

    def __init__(self, engine: Owner, key: int, tier: str, nbytes: int, region: str) -> None:
        super().__init__(nbytes, State.DEVICE)  # bytes of the storage; once moved, of what moved
        self.engine = engine
        self.key = key
        self.tier = tier
        self.region = region
        self.records: list[Record | None] = []
        # The compute streams that it was stashed on: autograd uses it there, so there it was written, and there it may
        # be freed. Whichever stream is current once it moves has seen nothing of that.
        self.streams: tuple[int, ...] = ()
        self.ordinal: int | None = None
        self.departure: Copy | None = None

    def live(self) -> list[Record]:
        """The records whose handles are alive."""
        return [record for record in self.records if record is not None]

    def is_live(self) -> bool:
        """Whether a handle is alive."""
        return any(self.records)

    def copies(self) -> tuple[Copy, ...]:
        """See `Loadable.copies`."""
        return tuple(copy for copy in (self.departure, self.arrival) if copy is not None)

    def written(self) -> list[Event]:
        """See `Loadable.written`."""
        return [] if self.departure is None else [self.departure.need()]

    def is_gone(self) -> None:
        """See `Loadable.is_gone`."""
        super().is_gone()
        for record in self.live():
            record.fetched = False

    def is_last_keeper(self) -> bool:
        """Whether nobody but the records here keeps the storage alive: moving it will free its memory."""
        # Held while counting: a handle may be dropped in between, and its storage with it.
        held = next(filter(None, self.records), None)
        # A cache that every layer is given has a record for each of them, and a stash asks this of all that waits:
        # what is shared must be seen without going through them.
        if held is None or _references(self.key) > len(self.records):
            return False
        records = self.live()
        return len(records) > 0 and _references(self.key) <= len(records)


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
