"""Pieces of memory that a region may change, each with all the names by which the region knows it.

A buffer may also be an argument, a view of it an attribute, and a child may hold a row of its parent's table. A rerun
must find the old values under every name, and a change by one name must show under the others. So what overlaps in
memory is copied together, and every name is made again over the one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memscale.regions.hidden_changes import extent, overlap, storages

Name = tuple[int, Any] | int  # (position of a place, key in it), or the index of an argument


class _Form(NamedTuple):
    """How a tensor lies in its piece."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base: int  # the same for tensors that are views of one another to autograd
    requires_grad: bool
    is_leaf: bool


class Piece:
    """Tensors that overlap, and what they held.

    Attributes:
        names: the names of the tensors, each with the position of its tensor among these.
        argument: the index of the argument that is its only name, if that is so.
        tensors: the tensors themselves, until `let_go`.
        written: whether an operator was seen to write to it.
        problem: why the names cannot be made again, if they cannot.
    """

    __slots__ = ("_copy", "_forms", "_start", "argument", "names", "problem", "tensors", "written")

    def __init__(self, members: Iterable[tuple[torch.Tensor, list[Name]]]) -> None:
        self.names: dict[Name, int] = {}
        self.tensors: list[torch.Tensor] = []
        for index, (tensor, names) in enumerate(members):
            self.tensors.append(tensor)
            self.names.update(dict.fromkeys(names, index))
        first = next(iter(self.names))
        self.argument = first if isinstance(first, int) and len(self.names) == 1 else None
        self.written = False
        several = len(self.tensors) > 1
        self._forms = [_form(tensor, several) for tensor in self.tensors]
        self._start = min(form.offset for form in self._forms) if several else 0
        self.problem = _problem(self.tensors, self._forms) if several else None
        self._copy: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether there is a copy to make the names again from."""
        return self._copy is not None

    def take(self) -> Piece:
        """Copy what it holds now, if that has not been done and can be. Without autograd, and unrecorded."""
        if self._copy is None and self.problem is None:
            contents = self.tensors[0]
            if len(self.tensors) > 1:
                length = max(extent(tensor)[1] for tensor in self.tensors) // contents.element_size() - self._start
                contents = contents.as_strided((length,), (1,), self._start)
            self._copy = contents.clone()
        return self

    def let_go(self) -> None:
        """Hold the copy only: the region has run."""
        self.tensors = []

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor with what it held."""
        assert self._copy is not None
        for tensor, form in zip(self.tensors, self._forms, strict=True):
            yield tensor, self._copy if len(self._forms) == 1 else self._view(self._copy, form)

    def old(self) -> torch.Tensor:
        """The copy, of a piece with one tensor."""
        assert self._copy is not None
        return self._copy

    def again(self, *, last: bool) -> dict[Name, torch.Tensor]:
        """New tensors over a copy of what it held; over the only copy, if this is the `last` time.

        Without autograd, and unrecorded.
        """
        assert self._copy is not None
        memory = self._copy if last else self._copy.clone()
        made = [_alone(memory, self._forms[0])] if len(self._forms) == 1 else self._together(memory)
        return {name: made[index] for name, index in self.names.items()}

    def _together(self, memory: torch.Tensor) -> list[torch.Tensor]:
        trained = next((form.base for form in self._forms if form.requires_grad), None)
        if trained is not None:
            # What a region changes in place is no leaf.
            with torch.enable_grad():
                memory = memory.requires_grad_().clone()
        made: dict[int, torch.Tensor] = {}
        for base in dict.fromkeys(form.base for form in self._forms):
            members = [index for index, form in enumerate(self._forms) if form.base == base]
            # Detached, they share memory and version counter, but autograd does not take them for views.
            root = memory if base == trained else memory.detach()
            if len(members) == 1 and base != trained:
                with torch.no_grad():
                    made[members[0]] = self._view(root, self._forms[members[0]]).detach()
                continue
            with torch.enable_grad():
                made.update({index: self._view(root, self._forms[index]) for index in members})
        return [made[index] for index in range(len(self._forms))]

    def _view(self, memory: torch.Tensor, form: _Form) -> torch.Tensor:
        return memory.as_strided(form.size, form.stride, form.offset - self._start)


def _form(tensor: torch.Tensor, several: bool) -> _Form:
    if not several:
        return _Form(tensor.size(), (), 0, 0, tensor.requires_grad, tensor.is_leaf)
    base = tensor._base if tensor._is_view() else None
    return _Form(
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        id(tensor if base is None else base),
        tensor.requires_grad,
        tensor.is_leaf,
    )


def _problem(tensors: list[torch.Tensor], forms: list[_Form]) -> str | None:
    if len({tensor.dtype for tensor in tensors}) > 1 or any(t.is_conj() or t.is_neg() for t in tensors):
        return "which it also has by a view of another type"
    trained = {form.base for form in forms if form.requires_grad}
    if len(trained) > 1 or any(form.base in trained and not form.requires_grad for form in forms):
        return "which it also has by a tensor with another gradient"
    return None


def _alone(memory: torch.Tensor, form: _Form) -> torch.Tensor:
    if not form.requires_grad or form.is_leaf:
        return memory.requires_grad_(form.requires_grad)
    with torch.enable_grad():
        return memory.requires_grad_().clone()


class Pieces:
    """The pieces among some tensors. Those of a storage are put together when one of them is asked for.

    Args:
        named: the tensors, each with its name and its storage, which the caller holds.
    """

    __slots__ = ("_by_storage", "_pieces")

    def __init__(self, named: Iterable[tuple[Name, torch.Tensor, Any]]) -> None:
        self._by_storage: dict[int, dict[int, tuple[torch.Tensor, list[Name]]]] = {}
        self._pieces: dict[int, list[Piece]] = {}
        for name, tensor, storage in named:
            members = self._by_storage.setdefault(id(storage), {})
            members.setdefault(id(tensor), (tensor, []))[1].append(name)

    def of(self, storage: Any, tensor: torch.Tensor) -> Piece:
        """The piece of `tensor`, which is one of them."""
        pieces = self._within(storage)
        if len(pieces) == 1:
            return pieces[0]
        return next(piece for piece in pieces if any(tensor is member for member in piece.tensors))

    def within(self, written: torch.Tensor) -> list[Piece]:
        """The pieces that share memory with `written`."""
        found = storages([written])[0]
        return [piece for piece in self._within(found) if any(overlap(written, member) for member in piece.tensors)]

    def copied(self) -> list[Piece]:
        """The pieces that there is a copy of."""
        return [piece for pieces in self._pieces.values() for piece in pieces if piece.is_copied]

    def problem_of(self, name: Name) -> str | None:
        """Why the piece with `name` cannot be copied."""
        found = (piece.problem for pieces in self._pieces.values() for piece in pieces if name in piece.names)
        return next(found, None)

    def _within(self, storage: Any) -> list[Piece]:
        key = id(storage)
        if key not in self._pieces:
            members = list(self._by_storage.get(key, {}).values())
            if not members:
                return []
            self._pieces[key] = [Piece(group) for group in _overlapping(members)]
        return self._pieces[key]


def _overlapping(
    members: list[tuple[torch.Tensor, list[Name]]],
) -> list[list[tuple[torch.Tensor, list[Name]]]]:
    """`members`, which share a storage, in groups that share no byte with each other."""
    if len(members) == 1:
        return [members]
    groups: list[list[tuple[torch.Tensor, list[Name]]]] = []
    end = -1
    for (start, stop), member in sorted(((extent(m[0]), m) for m in members), key=lambda found: found[0]):
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(member)
        end = max(end, stop)
    return groups
