"""AliasGroups of memory that a region may change, each with all the names by which the region knows it.

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


class AliasGroup:
    """A tensor that overlaps with no other, and what it held.

    Attributes:
        names: the names of the tensors, each with the position of its tensor among these.
        argument: the index of the argument that is its only name, if that is so.
        tensors: the tensors themselves, until `let_go`.
        written: whether an operator was seen to write to it.
        problem: why the names cannot be made again, if they cannot.
    """

    __slots__ = ("_copy", "_is_leaf", "_requires_grad", "argument", "names", "problem", "tensors", "written")

    def __init__(self, tensors: list[torch.Tensor], names: dict[Name, int]) -> None:
        self.names = names
        self.tensors = tensors
        first = next(iter(names))
        self.argument = first if isinstance(first, int) and len(names) == 1 else None
        self.written = False
        self.problem: str | None = None
        self._requires_grad, self._is_leaf = tensors[0].requires_grad, tensors[0].is_leaf
        self._copy: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether there is a copy to make the names again from."""
        return self._copy is not None

    def take(self) -> AliasGroup:
        """Copy what it holds now, if that has not been done and can be. Unrecorded."""
        if self._copy is None and self.problem is None:
            self._copy = self._taken()
        return self

    def _taken(self) -> torch.Tensor:
        tensor = self.tensors[0]
        if not tensor.requires_grad:  # entering `no_grad` takes as long as the copy of a small buffer
            return tensor.clone()
        with torch.no_grad():
            return tensor.clone()

    def let_go(self) -> None:
        """Hold the copy only: the region has run."""
        self.tensors = []

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor with what it held."""
        yield self.tensors[0], self.old()

    def old(self) -> torch.Tensor:
        """The copy."""
        assert self._copy is not None
        return self._copy

    def again(self, *, last: bool) -> dict[Name, torch.Tensor]:
        """New tensors over a copy of what it held; over the only copy, if this is the `last` time. Unrecorded."""
        memory = self.old() if last else self.old().clone()
        return dict.fromkeys(self.names, self._alone(memory))

    def _alone(self, memory: torch.Tensor) -> torch.Tensor:
        if not self._requires_grad:
            return memory
        if self._is_leaf:
            return memory.requires_grad_()
        with torch.enable_grad():
            return memory.requires_grad_().clone()


class _Form(NamedTuple):
    """How a tensor lies in its piece."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base: int  # the same for tensors that are views of one another to autograd
    requires_grad: bool


class _Overlapping(AliasGroup):
    """Tensors that overlap, and what they held."""

    __slots__ = ("_forms", "_start")

    def __init__(self, tensors: list[torch.Tensor], names: dict[Name, int]) -> None:
        super().__init__(tensors, names)
        self._forms = [_form(tensor) for tensor in tensors]
        self._start = min(form.offset for form in self._forms)
        self.problem = _problem(tensors, self._forms)

    def _taken(self) -> torch.Tensor:
        first = self.tensors[0]
        length = max(extent(tensor)[1] for tensor in self.tensors) // first.element_size() - self._start
        with torch.no_grad():
            return first.as_strided((length,), (1,), self._start).clone()

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tensor, form in zip(self.tensors, self._forms, strict=True):
            yield tensor, self._view(self.old(), form)

    def again(self, *, last: bool) -> dict[Name, torch.Tensor]:
        with torch.no_grad():
            made = self._together(self.old() if last else self.old().clone())
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


def _form(tensor: torch.Tensor) -> _Form:
    base = tensor._base if tensor._is_view() else None
    root = id(tensor if base is None else base)
    return _Form(tensor.size(), tensor.stride(), int(tensor.storage_offset()), root, tensor.requires_grad)


def _problem(tensors: list[torch.Tensor], forms: list[_Form]) -> str | None:
    if len({tensor.dtype for tensor in tensors}) > 1 or any(t.is_conj() or t.is_neg() for t in tensors):
        return "which it also has by a view of another type"
    trained = {form.base for form in forms if form.requires_grad}
    if len(trained) > 1 or any(form.base in trained and not form.requires_grad for form in forms):
        return "which it also has by a tensor with another gradient"
    return None


class AliasGroups:
    """The pieces among some tensors. Those of a storage are put together when one of them is asked for.

    Args:
        named: the tensors, each with its name and its storage, which the caller holds.
    """

    __slots__ = ("_by_storage", "_pieces")

    def __init__(self, named: Iterable[tuple[Name, torch.Tensor, Any]]) -> None:
        self._by_storage: dict[int, dict[int, tuple[torch.Tensor, list[Name]]]] = {}
        self._pieces: dict[int, list[AliasGroup]] = {}
        for name, tensor, storage in named:
            members = self._by_storage.setdefault(id(storage), {})
            members.setdefault(id(tensor), (tensor, []))[1].append(name)

    def of(self, storage: Any, tensor: torch.Tensor) -> AliasGroup:
        """The piece of `tensor`, which is one of them."""
        pieces = self._within(storage)
        if len(pieces) == 1:
            return pieces[0]
        return next(piece for piece in pieces if any(tensor is member for member in piece.tensors))

    def within(self, written: torch.Tensor) -> list[AliasGroup]:
        """The pieces that share memory with `written`."""
        found = storages([written])[0]
        return [piece for piece in self._within(found) if any(overlap(written, member) for member in piece.tensors)]

    def copied(self) -> list[AliasGroup]:
        """The pieces that there is a copy of."""
        return [piece for pieces in self._pieces.values() for piece in pieces if piece.is_copied]

    def problem_of(self, name: Name) -> str | None:
        """Why the piece with `name` cannot be copied."""
        found = (piece.problem for pieces in self._pieces.values() for piece in pieces if name in piece.names)
        return next(found, None)

    def _within(self, storage: Any) -> list[AliasGroup]:
        key = id(storage)
        if key not in self._pieces:
            members = list(self._by_storage.get(key, {}).values())
            if not members:
                return []
            self._pieces[key] = [_piece(group) for group in _overlapping(members)]
        return self._pieces[key]


def _piece(members: list[tuple[torch.Tensor, list[Name]]]) -> AliasGroup:
    names = {name: index for index, (_, known) in enumerate(members) for name in known}
    return (AliasGroup if len(members) == 1 else _Overlapping)([tensor for tensor, _ in members], names)


def _overlapping(members: list[tuple[torch.Tensor, list[Name]]]) -> list[list[tuple[torch.Tensor, list[Name]]]]:
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
