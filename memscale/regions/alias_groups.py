"""Alias groups: the tensors of a region that overlap in memory, with every name by which the region reaches them.

A buffer may also be an argument, an attribute may be a view of a buffer, and a child module may hold a row of its
parent's table. A rerun must find the old values under every name, and a write through one name must show under the
others. Overlapping tensors are therefore copied together, and a rerun gets every name as a view of the one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memscale.regions.hidden_changes import extent, overlap, storages

Name = tuple[int, Any] | int  # (position of a slot, key in it), or the index of an argument


class AliasGroup:
    """One tensor that overlaps with no other, and a copy of its values before the run.

    Attributes:
        names: maps each name to the index of its tensor in `tensors`.
        argument: the index of the argument, if an argument is the only name of the group; else `None`.
        shares_argument: whether an argument is one of several names.
        tensors: the tensors of the group; empty after `let_go`.
        written: whether an operator was seen to write to the group.
        problem: why the group cannot be copied and made again, or `None`.
    """

    def __init__(self, tensors: list[torch.Tensor], names: dict[Name, int]) -> None:
        self.names = names
        self.tensors = tensors
        first = next(iter(names))
        self.argument = first if isinstance(first, int) and len(names) == 1 else None
        self.shares_argument = len(names) > 1 and any(isinstance(name, int) for name in names)
        self.written = False
        self.problem: str | None = None
        self._requires_grad, self._is_leaf = tensors[0].requires_grad, tensors[0].is_leaf
        self._copy: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether the group has a copy of its values."""
        return self._copy is not None

    def take(self) -> AliasGroup:
        """Copies the present values, once, unless the group has a `problem`. Recorders do not see the copy."""
        if self._copy is None and self.problem is None:
            self._copy = self._clone()
        return self

    def _clone(self) -> torch.Tensor:
        tensor = self.tensors[0]
        if not tensor.requires_grad:  # entering `no_grad` would double the time of copying a small buffer
            return tensor.clone()
        with torch.no_grad():
            return tensor.clone()

    def let_go(self) -> None:
        """Drops the references to the tensors and keeps the copy. Called after the region has run."""
        self.tensors = []

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each tensor with its old values."""
        yield self.tensors[0], self.old()

    def old(self) -> torch.Tensor:
        """Returns the copy."""
        assert self._copy is not None
        return self._copy

    def again(self, *, last: bool) -> dict[Name, torch.Tensor]:
        """Returns new tensors with the old values, by name. The `last` call hands out the copy itself, without a clone.

        Recorders do not see the clone.
        """
        memory = self.old() if last else self.old().clone()
        if self._requires_grad:
            memory.requires_grad_()
            if not self._is_leaf:
                with torch.enable_grad():
                    memory = memory.clone()
        return dict.fromkeys(self.names, memory)


class _Form(NamedTuple):
    """Size, stride and offset (in elements) of a tensor in its alias group, and the view it belongs to."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base: int  # equal for tensors that autograd treats as views of one another
    requires_grad: bool


class _Overlapping(AliasGroup):
    """Several tensors that overlap in memory, and a copy of the bytes that they cover."""

    def __init__(self, tensors: list[torch.Tensor], names: dict[Name, int]) -> None:
        super().__init__(tensors, names)
        self._forms = [_form(tensor) for tensor in tensors]
        self._start = min(form.offset for form in self._forms)
        self.problem = _problem(tensors, self._forms)

    def _clone(self) -> torch.Tensor:
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
            # PyTorch refuses writes in place to a leaf that requires gradients, so the copy is made a non-leaf.
            with torch.enable_grad():
                memory = memory.requires_grad_().clone()
        made: dict[int, torch.Tensor] = {}
        for base in dict.fromkeys(form.base for form in self._forms):
            members = [index for index, form in enumerate(self._forms) if form.base == base]
            # Detached tensors share memory and version counter, and autograd does not treat them as views.
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
        return "which it also reaches by a view of another dtype"
    trained = {form.base for form in forms if form.requires_grad}
    if len(trained) > 1 or any(form.base in trained and not form.requires_grad for form in forms):
        return "which it also reaches by a tensor with another gradient"
    return None


class AliasGroups:
    """Groups tensors by overlap. The groups of a storage are formed when one of its tensors is first looked up.

    Args:
        named: tuples (name, tensor, storage). The caller must keep the storages alive.
    """

    def __init__(self, named: Iterable[tuple[Name, torch.Tensor, Any]]) -> None:
        self._by_storage: dict[int, dict[int, tuple[torch.Tensor, list[Name]]]] = {}
        self._groups: dict[int, list[AliasGroup]] = {}
        for name, tensor, storage in named:
            members = self._by_storage.setdefault(id(storage), {})
            members.setdefault(id(tensor), (tensor, []))[1].append(name)

    def of(self, storage: Any, tensor: torch.Tensor) -> AliasGroup:
        """Returns the group of `tensor`, which must be one of the named tensors."""
        groups = self._within(storage)
        if len(groups) == 1:
            return groups[0]
        return next(group for group in groups if any(tensor is member for member in group.tensors))

    def within(self, written: torch.Tensor) -> list[AliasGroup]:
        """Returns the groups that share memory with `written`."""
        found = storages([written])[0]
        return [group for group in self._within(found) if any(overlap(written, member) for member in group.tensors)]

    def copied(self) -> list[AliasGroup]:
        """Returns the groups that have a copy."""
        return [group for groups in self._groups.values() for group in groups if group.is_copied]

    def problem_of(self, name: Name) -> str | None:
        """Returns why the group with `name` cannot be copied, or `None` if it can."""
        found = (group.problem for groups in self._groups.values() for group in groups if name in group.names)
        return next(found, None)

    def _within(self, storage: Any) -> list[AliasGroup]:
        key = id(storage)
        if key not in self._groups:
            members = list(self._by_storage.get(key, {}).values())
            if not members:
                return []
            self._groups[key] = [_group(group) for group in _overlapping(members)]
        return self._groups[key]


def _group(members: list[tuple[torch.Tensor, list[Name]]]) -> AliasGroup:
    names = {name: index for index, (_, known) in enumerate(members) for name in known}
    return (AliasGroup if len(members) == 1 else _Overlapping)([tensor for tensor, _ in members], names)


def _overlapping(members: list[tuple[torch.Tensor, list[Name]]]) -> list[list[tuple[torch.Tensor, list[Name]]]]:
    """Splits `members`, tensors of one storage, into groups that share no byte with each other."""
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
