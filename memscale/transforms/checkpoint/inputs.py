"""The tensors that a region was called with, kept for its recomputes.

A recompute gets the same tensor objects as the forward, so that `is`, `isinstance`, `is_leaf` and attributes give the
same answers. The graphs of these tensors do no harm, since no backward starts from a recompute. Two kinds of tensors
are replaced by tensors of the same class with the same attributes: tensors that the region changes in place, and
tensors that saved-tensor hooks around the region keep (an outer checkpoint, an offload).
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from memscale.core import CorrectnessError
from memscale.regions import CONSTANT, Captures, unrecorded
from memscale.transforms.checkpoint.saved import SavedTensors


def plain_tensors(values: Iterable[Any], found: list[torch.Tensor]) -> bool:
    """Appends the tensors among the arguments `values` to `found`. Returns whether a rerun can reuse `values` directly.

    A rerun can if `values` are only distinct tensors, constants, and tuples of these: an `ArgumentSpec` would rebuild
    equal arguments.
    """
    for value in values:
        kind: Any = type(value)
        if kind is torch.Tensor or kind is nn.Parameter:
            if value.__dict__:
                return False
            found.append(value)
        elif kind is tuple:
            if not plain_tensors(value, found):
                return False
        elif kind not in CONSTANT:
            return False
    return len(found) < 2 or len(set(map(id, found))) == len(found)


class Inputs:
    """Some tensors, held directly or through saved-tensor hooks.

    Args:
        tensors: the tensors.
        trained: `requires_grad` of each.
        captures: the captures of the region, whose tensors are held directly.
        hooks: the saved-tensor hooks around the region as (pack, unpack), or `None`.
    """

    def __init__(self, tensors: list[torch.Tensor], trained: list[bool], captures: Captures, hooks: Any) -> None:
        self._requires_grad = trained
        self._replaced: set[int] = set()  # indices of tensors that the region changes in place
        self._is_cut = False
        self._attributes = {index: dict(each.__dict__) for index, each in enumerate(tensors) if each.__dict__}
        self._leaves: list[bool] = []  # `is_leaf` of each tensor; empty without hooks
        direct: frozenset[int] = frozenset()
        if hooks is not None:
            self._leaves = [tensor.is_leaf for tensor in tensors]
            captured = {id(tensor) for _, _, tensor in captures.tensors}
            own = [isinstance(tensor, nn.Parameter) or id(tensor) in captured for tensor in tensors]
            direct = frozenset(itertools.compress(itertools.count(), own))
        self._kept = SavedTensors(tensors, hooks, direct)

    def seal(self, versions: list[int]) -> None:
        """Requires the tensors to stay at `versions` from now on."""
        self._kept.seal(versions)

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Keeps `tensor`, the old value of an argument that the region changes in place, at `index`."""
        self._replaced.add(index)
        self._kept.replace(index, tensor)

    def cut(self) -> None:
        """Detaches the tensors for recomputes: a backward inside the region must end at the region's inputs."""
        self._is_cut = True

    def again(
        self,
        without: Collection[Any],
        replaced: dict[int, torch.Tensor],
        owner: Callable[[int], str | None],
        refused: dict[int, str],
        fresh: list[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Returns the tensors for a recompute by index, except the indices `without`.

        Args:
            without: indices of tensors that the snapshot restores.
            replaced: for a recompute during the run, the old values of tensors that the run has changed, by index.
            owner: maps an index to the class name of the object among the arguments that holds the tensor, or `None`.
            refused: receives, by storage, the error message for each tensor of an object that was changed since.
            fresh: receives the copies, whose version counters start anew.
        """
        if not (without or replaced) and (as_they_are := self._unchanged()) is not None:
            return as_they_are
        made: dict[int, torch.Tensor] = {}
        found: dict[int, torch.Tensor] = {}
        for index, requires_grad in enumerate(self._requires_grad):
            if index in without:
                continue
            is_changed = index in replaced or index in self._replaced
            held = replaced[index] if index in replaced else self._held(index, owner, refused)
            if id(held) not in made:
                made[id(held)] = self._given(index, held, requires_grad, is_changed, fresh)
            found[index] = made[id(held)]
        return found

    def _unchanged(self) -> dict[int, torch.Tensor] | None:
        """Returns all tensors if a rerun can use every tensor as it is, else `None`. One pass: a cache has hundreds."""
        is_other = self._replaced or self._attributes or self._is_cut
        held = None if is_other else self._kept.unchanged()
        if held is None or [tensor.requires_grad for tensor in held] != self._requires_grad:
            return None
        return None if [each for each in held if each.__dict__] else dict(enumerate(held))

    def _held(self, index: int, owner: Callable[[int], Any], refused: dict[int, str]) -> torch.Tensor:
        where = owner(index)
        what = f"tensor argument {index}{'' if where is None else f' (held by a {where})'} of a checkpointed region"
        return self._kept.tensor(index, what, None if where is None else refused)

    def _given(
        self, index: int, held: torch.Tensor, requires_grad: bool, is_changed: bool, fresh: list[torch.Tensor]
    ) -> torch.Tensor:
        attributes = self._attributes.get(index, {})
        if is_changed:  # the clone has its own memory and is no leaf: PyTorch refuses to change leaves in place
            with unrecorded(), torch.enable_grad():
                given = held.detach().requires_grad_(requires_grad).clone()
            fresh.append(given)
        elif self._kept.through_hooks(index):
            fresh.append(held)
            given = held.detach().requires_grad_(requires_grad)
            if requires_grad and not self._leaves[index] and type(given) is torch.Tensor and not given.is_nested:
                with unrecorded(), torch.enable_grad():
                    given = torch.ops.aten.alias(given)
        elif (
            held.requires_grad != requires_grad
            or (self._is_cut and not held.is_leaf)
            or _differ(held.__dict__, attributes)
        ):
            given = held.detach()
            if isinstance(held, nn.Parameter):
                given = nn.Parameter(given, requires_grad)
            given.requires_grad_(requires_grad)
        else:
            return held
        given.__dict__.update(attributes)
        return given


def _differ(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return bool(now or then) and ({k: id(v) for k, v in now.items()} != {k: id(v) for k, v in then.items()})


def refuse_backward_behind(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Makes a backward of this thread raise `CorrectnessError` if the backward goes beyond one of `tensors`.

    Returns the handles of the hooks, to be removed.
    """
    nodes = list(filter(None, map(_grad_fn, tensors)))
    if not nodes:
        return nodes
    refuse = functools.partial(_refuse, threading.get_ident())
    return [node.register_prehook(refuse) for node in nodes]


_grad_fn = operator.attrgetter("grad_fn")


def _refuse(thread: int, _: Any) -> None:
    if threading.get_ident() == thread:  # backwards of other threads are not the region's
        raise CorrectnessError(
            "a region runs a backward that goes on behind its arguments, and a recompute would run it again; "
            "detach the arguments inside the region, or do not checkpoint this region"
        )
