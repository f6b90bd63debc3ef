"""Going back to the moment of a snapshot, for as long as a recompute runs, and to the present again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale.core import CorrectnessError, pytrees
from memscale.regions.alias_groups import Name
from memscale.regions.captures import Captures
from memscale.regions.hidden_changes import memory_of
from memscale.regions.modes import modes
from memscale.regions.places import Content, Place, holds, read, write
from memscale.regions.snapshot import Snapshot, is_sharded
from memscale.regions.stand_ins import Note
from memscale.regions.turns import my_turn
from memscale.regions.uncompiled import OperatorWatch
from memscale.regions.unrecorded import copies_ahead, unrecorded


class Replay:
    """A context in which a region runs as if no time had passed since `snapshot`. Afterwards all is as it was before.

    Entering gives the arguments that the region changes and also has by other names, made again with these.

    Args:
        snapshot: of the run that is to be repeated.
        last: whether no other rerun will follow this one if it succeeds, so that it may change the old values
            themselves.
        refused: the storages of changed arguments, each with what to say if the rerun uses it.
        fresh: receives the tensors that the rerun may change: their version counters start anew.
        made: receives the storages that the rerun makes, where it runs under a dispatch mode and the run did not.

    Raises:
        CorrectnessError: a tensor that the region depends on was changed in place since, if only by a last rerun
            that failed.
    """

    __slots__ = ("_around", "_fresh", "_last", "_made", "_present", "_refused", "_snapshot", "_undo")

    def __init__(
        self, snapshot: Snapshot, *, last: bool, refused: dict[int, str], fresh: list[torch.Tensor], made: set[int]
    ) -> None:
        self._snapshot = snapshot
        self._last = last
        self._refused = refused
        self._fresh = fresh
        self._made = made
        self._around: list[AbstractContextManager[Any]] = []
        self._undo: list[Callable[[], Any]] = []
        # What each place holds, where that is not all as it was; what the rerun leaves there is undone.
        self._present: list[tuple[Place, Content]] | None = []

    def __enter__(self) -> dict[int, torch.Tensor]:
        try:
            return self._enter()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _enter(self) -> dict[int, torch.Tensor]:
        snapshot, environment = self._snapshot, self._snapshot.environment
        self._enter_around(my_turn())
        changed = snapshot.changed_since()
        changed.update(self._refused)
        arrived: Mapping[Note, torch.Tensor] = {}
        if snapshot.notes:
            arrived = self._enter_around(snapshot.notes[0].bring_back(snapshot.notes))
        renewed = self._old_values()
        self._fresh.extend(renewed.values())
        self._go_back(self._trained_as_then(renewed), arrived)
        environment.enter(self._undo)
        for tensor in snapshot.graded:  # else a backward inside would add to it again
            self._undo.append(partial(setattr, tensor, "grad", tensor.grad))
            tensor.grad = None
        # Under a mode, which the run was not, operators may leave other versions: those are told by `made`.
        if changed or (not environment.dispatched and modes().dispatched):
            self._watch(_ChangedWatch(changed, self._made))
        if changed:
            self._watch(_ListedWatch(changed))
        if snapshot.is_watched:
            self._watch(snapshot.watching())
        return {name: tensor for name, tensor in renewed.items() if isinstance(name, int)}

    def _enter_around(self, context: AbstractContextManager[Any]) -> Any:
        entered = context.__enter__()
        self._around.append(context)
        return entered

    def _watch(self, mode: Any) -> None:
        mode.__enter__()
        self._undo.append(partial(mode.__exit__, None, None, None))

    def __exit__(self, *error: Any) -> None:
        try:
            for step in reversed(self._undo):
                step()
            captures = self._snapshot.captures
            if self._present is None and not captures.is_current:
                self._present = _contents(captures)
            for place, content in reversed(self._present or ()):  # two may be parts of one thing
                if not holds(place, content):
                    write(place, content)
        finally:
            for context in reversed(self._around):
                context.__exit__(*error)

    def _old_values(self) -> dict[Name, torch.Tensor]:
        """What the region changes in place, as it was; for the last rerun not copies, but what the snapshot keeps."""
        snapshot, last = self._snapshot, self._last
        if snapshot.is_running:
            snapshot.find_reassigned()
        pieces = [piece for piece in snapshot.pieces() if piece.argument is None]
        if snapshot.given_away:
            raise CorrectnessError(
                "a checkpointed region cannot be recomputed again: its recompute failed in an earlier backward, and it "
                f"may have changed the only copy of {snapshot.title(next(iter(pieces[0].names)))}, which the "
                "region changes in place. Run the forward again; if a backward may fail and be repeated, give it "
                "retain_graph=True, which spares that copy"
            )
        if not pieces:
            return {}
        # Said before, not when it fails: an interrupt can come at any moment.
        snapshot.given_away = last
        with unrecorded():
            return {name: tensor for piece in pieces for name, tensor in piece.again(last=last).items()}

    def _trained_as_then(self, renewed: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """`renewed`, and stand-ins for what was frozen or unfrozen since: the region must save again what it saved."""
        snapshot = self._snapshot
        if not renewed and [tensor.requires_grad for tensor in snapshot.tensors] == snapshot.trained:
            return renewed
        made: dict[int, torch.Tensor] = {}
        found = dict(renewed)
        for (position, key, tensor), then in zip(snapshot.captures.tensors, snapshot.trained, strict=True):
            if (old_value := renewed.get((position, key))) is not None:
                old_value.requires_grad_(then)
            elif tensor.requires_grad != then:
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor, then)
                found[position, key] = made[id(tensor)]
        self._fresh.extend(made.values())  # a parameter that came to the device for the run is there as another tensor
        return found

    def _go_back(self, renewed: dict[Name, torch.Tensor], arrived: Mapping[Note, torch.Tensor]) -> None:
        """Let every place hold what it held then."""
        captures = self._snapshot.captures
        touched = {name[0] for name in renewed if not isinstance(name, int)}
        if not touched and captures.is_current:
            self._present = None
            return
        contents = _contents(captures)
        self._present = [(place, then if holds(place, then) else read(place)) for place, then in contents]
        for position, (place, then) in enumerate(contents):
            if position in touched or self._present[position][1] is not then:
                write(place, _as_then(position, place, then, renewed, arrived))


def _contents(captures: Captures) -> list[tuple[Place, Content]]:
    return [*zip(captures.places, captures.contents, strict=True), *captures.hooks]


def _as_then(
    position: int,
    place: Place,
    content: Content,
    renewed: dict[Name, torch.Tensor],
    arrived: Mapping[Note, torch.Tensor],
) -> Content:
    """`content`, what the place held, with new tensors for those that are not there any more."""
    content = content.copy()
    for key, then in content.items() if isinstance(content, dict) else list(enumerate(content)):
        if (other := renewed.get((position, key))) is not None:
            content[key] = other
        elif isinstance(then, Note):
            content[key] = arrived[then]
        elif is_sharded(then) and isinstance(present := read(place), dict):
            # FSDP2 puts sharded and gathered parameters in turn into the same entry; what is there now is right.
            content[key] = present.get(key, then)
    return content


class _ChangedWatch(OperatorWatch):
    """Notes what a rerun makes, and raises `CorrectnessError` when it uses a tensor that was changed in place since.

    Not before: a captures can be wider than the region. A function that captures a whole model to call one block of it
    is right to find that other blocks have moved their statistics on. Nor for a copy that a transform inside takes
    of all that the region reaches: that is a changed tensor, too.
    """

    def __init__(self, changed: dict[int, str], made: set[int]) -> None:
        super().__init__()
        self._changed = changed
        self._made = made
        self._copies: list[Any] = []  # held, for other tensors must not get their addresses

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = _storages((args, kwargs))
        message = next((self._changed[storage] for storage in given if storage in self._changed), None)
        if message is not None and not copies_ahead():
            raise CorrectnessError(message)
        result = func(*args, **kwargs)
        received = _storages(result)
        self._made.update(received - given)
        if message is not None:
            self._changed.update(dict.fromkeys(received, message))
            self._copies.append(result)
        return result


class _ListedWatch(TorchFunctionMode):
    """Raises `CorrectnessError` when a rerun lists the values of a tensor that was changed: no operator does that."""

    def __init__(self, changed: dict[int, str]) -> None:
        super().__init__()
        self._changed = changed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and (message := self._changed.get(memory_of(args[0]))) is not None:
            raise CorrectnessError(message)
        return func(*args, **(kwargs or {}))


def _storages(tree: Any) -> set[int]:
    tensors = pytrees.tensors(tree)
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def _like(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    other = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad)
        other.__dict__.update(tensor.__dict__)
    return other.requires_grad_(requires_grad)
