"""Alias groups: the tensors of a region that overlap in memory, with every name by which the region reaches them.

A buffer may also be an argument, or an attribute of two modules: a rerun must find the old values under every name.
Different tensors that overlap, such as a buffer and a view of it, cannot be made again from one copy, so a region that
changes one of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memscale.regions.hidden_changes import extent, overlap, storages

Name = tuple[int, object] | int  # (position of a slot, key in it), or the index of an argument


class AliasGroup:
    """One tensor that overlaps with no other, and a copy of its values before the run.

    Attributes:
        names: every name of the group.
        tensors: the tensors of the group, more than one if several overlap; empty after `let_go`.
        argument: the index of the argument, if an argument is the only name of the group; else `None`.
        shares_argument: whether an argument is one of several names.
        written: whether an operator was seen to write to the group.
    """

    def __init__(self, tensors: list[torch.Tensor], names: list[Name]) -> None:
        self.names = names
        self.tensors = tensors
        self.argument = names[0] if isinstance(names[0], int) and len(names) == 1 else None
        self.shares_argument = len(names) > 1 and any(isinstance(name, int) for name in names)
        self.written = False
        self._requires_grad, self._is_leaf = tensors[0].requires_grad, tensors[0].is_leaf
        self._copy: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether the group has a copy of its values."""
        return self._copy is not None

    def take(self) -> AliasGroup:
        """Copies the present values, once, unless several tensors overlap. Recorders do not see the copy."""
        if self._copy is None and len(self.tensors) == 1:
            tensor = self.tensors[0]
            if not tensor.requires_grad:  # entering `no_grad` would double the time of copying a small buffer
                self._copy = tensor.clone()
            else:
                with torch.no_grad():
                    self._copy = tensor.clone()
        return self

    def let_go(self) -> None:
        """Drops the references to the tensors and keeps the copy. Called after the region has run."""
        self.tensors = []

    def old(self) -> torch.Tensor:
        """Returns the copy."""
        assert self._copy is not None
        return self._copy

    def again(self, *, last: bool) -> dict[Name, torch.Tensor]:
        """Returns a new tensor with the old values, by name. The `last` call hands out the copy itself.

        Recorders do not see the clone.
        """
        memory = self.old() if last else self.old().clone()
        if self._requires_grad:
            memory.requires_grad_()
            if not self._is_leaf:
                with torch.enable_grad():
                    memory = memory.clone()
        return dict.fromkeys(self.names, memory)


class AliasGroups:
    """Groups tensors by overlap. The groups of a storage are formed when one of its tensors is first looked up.

    Args:
        named: tuples (name, tensor, storage). The caller must keep the storages alive.
    """

    def __init__(self, named: Iterable[tuple[Name, torch.Tensor, object]]) -> None:
        self._by_storage: dict[int, dict[int, tuple[torch.Tensor, list[Name]]]] = {}
        self._groups: dict[int, list[AliasGroup]] = {}
        for name, tensor, storage in named:
            members = self._by_storage.setdefault(id(storage), {})
            members.setdefault(id(tensor), (tensor, []))[1].append(name)

    def of(self, storage: object, tensor: torch.Tensor) -> AliasGroup:
        """Returns the group of `tensor`, which must be one of the named tensors."""
        return next(group for group in self._within(storage) if any(tensor is member for member in group.tensors))

    def within(self, written: torch.Tensor) -> list[AliasGroup]:
        """Returns the groups that share memory with `written`."""
        found = storages([written])[0]
        return [group for group in self._within(found) if any(overlap(written, member) for member in group.tensors)]

    def every(self) -> list[AliasGroup]:
        """Returns the groups that were formed."""
        return [group for groups in self._groups.values() for group in groups]

    def _within(self, storage: object) -> list[AliasGroup]:
        key = id(storage)
        if key not in self._groups:
            self._groups[key] = _overlapping([*self._by_storage.get(key, {}).values()])
        return self._groups[key]


def _overlapping(members: list[tuple[torch.Tensor, list[Name]]]) -> list[AliasGroup]:
    """Returns the groups of `members`, tensors of one storage; no two groups share a byte."""
    if len(members) == 1:  # possibly a sparse tensor, without an extent
        return [AliasGroup([members[0][0]], members[0][1])]
    groups: list[tuple[list[torch.Tensor], list[Name]]] = []
    end = -1
    for (start, stop), (tensor, names) in sorted(((extent(m[0]), m) for m in members), key=lambda found: found[0]):
        if not groups or start >= end:
            groups.append(([], []))
        groups[-1][0].append(tensor)
        groups[-1][1].extend(names)
        end = max(end, stop)
    return [AliasGroup(tensors, names) for tensors, names in groups]
