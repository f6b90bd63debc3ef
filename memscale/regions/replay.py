"""Replay: restores the state of a snapshot while a recompute runs, and the present state afterwards."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale.core import CorrectnessError, interrupts_held, pytrees
from memscale.regions.alias_groups import Name
from memscale.regions.captures import Captures
from memscale.regions.hidden_changes import memory_of
from memscale.regions.recompute_lock import recompute_lock
from memscale.regions.snapshot import Snapshot
from memscale.regions.stand_ins import Note, is_sharded
from memscale.regions.state_slots import Content, StateSlot, holds, read, write
from memscale.regions.uncompiled import OperatorWatch
from memscale.regions.unrecorded import copies_ahead, unrecorded


class Replay:
    """A context that restores the state of `snapshot` for a rerun, and the present state at its end.

    To be entered with `recompute_lock.lock` held.

    Entering returns, by argument index, new tensors for the arguments that the region changes and also reaches by other
    names; these names get views of the same new memory.

    Args:
        snapshot: the snapshot of the run to repeat.
        last: whether this is the last rerun if it succeeds. The last rerun may write to the saved old values directly.
        refused: maps the storage of each argument changed since to the message to raise if the rerun uses it.
        fresh: receives the tensors that the rerun may change; their version counters start anew.
        made: receives the storages that the rerun makes, if it runs under a dispatch mode and the run did not.

    Raises:
        CorrectnessError: a tensor that the region depends on was changed in place since the run, for example by a last
            rerun that failed.
    """

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
        self._present: list[tuple[StateSlot, Content]] = []  # to be restored at the end
        self._thread = 0  # the thread that was recomputing before: this one around a nested recompute
        self._was_current = False  # whether nothing had changed since the snapshot

    def __enter__(self) -> dict[int, torch.Tensor]:
        snapshot = self._snapshot
        self._thread, recompute_lock.thread = recompute_lock.thread, threading.get_ident()
        try:
            if not self._refused and snapshot.is_present():
                self._was_current = True
                if snapshot.environment.enter(self._undo):
                    self._watch(_ChangedWatch({}, self._made))
                return {}
            interrupts_held.__enter__()
            self._around.append(interrupts_held)
            changed = snapshot.changed_since()
            changed.update(self._refused)
            arrived: dict[Note, torch.Tensor] = self._bring_back() if snapshot.notes else {}
            renewed = self._old_values() if snapshot.kept != [] else {}
            self._fresh.extend(renewed.values())
            is_trained_as_then = list(map(_requires_grad, snapshot.tensors)) == snapshot.trained
            self._go_back(renewed if is_trained_as_then else self._trained_as_then(renewed), arrived)
            is_dispatched = snapshot.environment.enter(self._undo)
            for tensor in snapshot.graded:  # a backward inside the region would otherwise accumulate a second time
                self._undo.append(partial(setattr, tensor, "grad", tensor.grad))
                tensor.grad = None
            # Under a dispatch mode operators may increment other versions than without; `made` lists the new tensors.
            if changed or is_dispatched:
                self._watch(_ChangedWatch(changed, self._made))
            if changed:
                self._watch(_ListedWatch(changed))
            if snapshot.is_watched:
                self._watch(snapshot.watching())
            return {name: tensor for name, tensor in renewed.items() if isinstance(name, int)} if renewed else {}
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _bring_back(self) -> dict[Note, torch.Tensor]:
        """Returns new stand-in tensors for the notes of the snapshot, which are valid until the end."""
        arrived: dict[Note, torch.Tensor] = {}
        for kind in dict.fromkeys(map(type, self._snapshot.notes)):
            first, *others = [note for note in self._snapshot.notes if type(note) is kind]
            context = first.bring_back([first, *others])
            arrived.update(context.__enter__())
            self._around.append(context)
        return arrived

    def _watch(self, mode: Any) -> None:
        mode.__enter__()
        self._undo.append(partial(mode.__exit__, None, None, None))

    def __exit__(self, *error: Any) -> None:
        try:
            self._restore()
        except KeyboardInterrupt:  # between two steps
            self._restore()
            raise
        finally:
            try:
                for context in reversed(self._around):
                    context.__exit__(*error)
            finally:
                recompute_lock.thread = self._thread

    def _restore(self) -> None:
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        if self._present:
            _write_back(self._present)
        if self._was_current and not self._snapshot.captures.is_current():
            _write_back(_contents(self._snapshot.captures))

    def _old_values(self) -> dict[Name, torch.Tensor]:
        """Returns the old values of tensors that the region changes in place; for the last rerun without a clone."""
        snapshot, last = self._snapshot, self._last
        if snapshot.is_running:
            snapshot.find_reassigned()
        groups = [group for group in snapshot.groups() if group.argument is None]
        if snapshot.given_away:
            raise CorrectnessError(
                "a checkpointed region cannot be recomputed again: its recompute failed in an earlier backward, and "
                f"may have changed the only copy of {snapshot.title(next(iter(groups[0].names)))}, which the region "
                "changes in place. Run the forward again; for a backward that may fail and be repeated, pass "
                "retain_graph=True, which keeps the copy"
            )
        if not groups:
            return {}
        # Set before the rerun and not on its failure, since an interrupt can come at any moment.
        snapshot.given_away = last
        with unrecorded():
            return {name: tensor for group in groups for name, tensor in group.again(last=last).items()}

    def _trained_as_then(self, renewed: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Returns `renewed` and stand-ins, with the old `requires_grad`, for tensors frozen or unfrozen since.

        With another `requires_grad`, the region would save other tensors than in its first run.
        """
        snapshot = self._snapshot
        made: dict[int, torch.Tensor] = {}
        found = dict(renewed)
        for (position, key, tensor), then in zip(snapshot.captures.tensors, snapshot.trained, strict=True):
            if (old_value := renewed.get((position, key))) is not None:
                old_value.requires_grad_(then)
            elif tensor.requires_grad != then:
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor, then)
                found[position, key] = made[id(tensor)]
        self._fresh.extend(made.values())  # a parameter fetched for the run is another tensor in the rerun
        return found

    def _go_back(self, renewed: dict[Name, torch.Tensor], arrived: Mapping[Note, torch.Tensor]) -> None:
        """Writes the snapshot's contents into every slot that has changed since."""
        captures = self._snapshot.captures
        self._was_current = is_current = captures.is_current()
        touched = {name[0] for name in renewed if not isinstance(name, int)}
        if is_current:
            contents = {position: (captures.slots[position], captures.contents[position]) for position in touched}
            self._present = [*contents.values()]
        else:
            contents = dict(enumerate(_contents(captures)))
            self._present = [(slot, then if holds(slot, then) else read(slot)) for slot, then in contents.values()]
            touched.update(at for at, (_, then) in contents.items() if self._present[at][1] is not then)
        for position in sorted(touched):
            slot, then = contents[position]
            write(slot, _as_then(position, slot, then, renewed, arrived))


def _write_back(contents: list[tuple[StateSlot, Content]]) -> None:
    for slot, content in reversed(contents):  # reversed, since two slots may share an object
        if not holds(slot, content):
            write(slot, _with_present_shards(slot, content))


def _with_present_shards(slot: StateSlot, content: Content) -> Content:
    """Returns `content` with the present entries for parameters of FSDP2.

    FSDP2 alternates sharded and gathered parameters in one entry, and takes the entry for what it put there last.
    """
    if not isinstance(content, dict):
        return content
    now = read(slot)
    assert isinstance(now, dict)
    present = {
        key: now[key]
        for key, then in content.items()
        if isinstance(then, nn.Parameter) and key in now and is_sharded(then) != is_sharded(now[key])
    }
    return content | present if present else content


def _contents(captures: Captures) -> list[tuple[StateSlot, Content]]:
    return [*zip(captures.slots, captures.contents, strict=True), *captures.hooks]


def _as_then(
    position: int,
    slot: StateSlot,
    content: Content,
    renewed: dict[Name, torch.Tensor],
    arrived: Mapping[Note, torch.Tensor],
) -> Content:
    """Returns a copy of `content`, the snapshot's contents of `slot`, with replacements for tensors no longer held."""
    content = _with_present_shards(slot, content).copy()
    for key, then in content.items() if isinstance(content, dict) else list(enumerate(content)):
        if (other := renewed.get((position, key))) is not None:
            content[key] = other
        elif isinstance(then, Note):
            content[key] = arrived[then]
    return content


_requires_grad = operator.attrgetter("requires_grad")


class _ChangedWatch(OperatorWatch):
    """Records the storages that a rerun makes. Raises `CorrectnessError` when it uses a tensor changed since the run.

    The error waits for a use, because captures can be wider than the region: a function that captures a whole model
    and calls one block of it may find changed statistics in other blocks. An inner transform copies everything that
    it captures. Such a copy does not count as a use, and is treated as changed, too.
    """

    def __init__(self, changed: dict[int, str], made: set[int]) -> None:
        super().__init__()
        self._changed = changed
        self._made = made
        self._copies: list[Any] = []  # kept alive, so that no other tensor gets the address of one

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
    """Raises `CorrectnessError` when a rerun calls `tolist` of a changed tensor, which runs no operator."""

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
