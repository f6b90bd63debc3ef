"""A region's dependencies at the moment it ran, and how to bring that moment back for a recompute.

What a region changes while it runs (BatchNorm statistics, a counter, its own input) must start from the old value
when it runs again. Python attributes are remembered by reference. A tensor changed in place has lost its old value
unless it was copied *before*, so the first run of a region, in each combination of train/eval flags, copies every
candidate and learns which ones it changes (`Habits`); later runs copy those only.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from memscale.core import CorrectnessError, changed_error, described, pytrees, simulating, versions
from memscale.regions.environment import Environment
from memscale.regions.hidden_changes import Writes, assigned, storages
from memscale.regions.modes import modes
from memscale.regions.pieces import Name, Piece, Pieces
from memscale.regions.scope import HOOKS, Attributes, Content, Place, Scope, holds, is_hooked, read, write
from memscale.regions.stand_ins import Note, is_stand_in, origin_of
from memscale.regions.uncompiled import OperatorWatch
from memscale.regions.unrecorded import unrecorded
from memscale.regions.views import ABSENT, can_see, my_turn, real, see_attributes, see_table


class Habits(NamedTuple):
    """What a region was seen to do on its first run: which tensors it changes, and Python randomness."""

    changed: frozenset[Name]
    reassigned: frozenset[Name]  # through `.data`: the old memory is still there, if somebody holds it
    host_random: bool
    assigned: Mapping[int, frozenset[str]]  # by position, the attributes of a module that it assigns


class Snapshot:
    """Scope, environment and argument versions of one call, before it runs.

    Args:
        scope: what the region's function depends on.
        arguments: the tensor arguments of the call, in order.
        habits: what earlier calls learned, `None` on the first.
    """

    __slots__ = (
        "_arguments",
        "_assigned",
        "_environment",
        "_first",
        "_given_away",
        "_held",
        "_kept",
        "_layouts",
        "_notes",
        "_pieces",
        "_reassigned",
        "_scope",
        "_storages",
        "_trained",
        "_versions",
    )

    def __init__(self, scope: Scope, arguments: list[torch.Tensor], habits: Habits | None) -> None:
        self._first = habits is None
        self._notes: list[Note] = []
        self._scope = scope
        self._arguments = arguments
        tensors = [tensor for _, _, tensor in scope.tensors]
        self._versions = versions(tensors)
        # Held until the region has run, so that what it makes cannot get the address of what it replaces.
        self._held = storages(tensors), storages(arguments)
        self._trained = [tensor.requires_grad for tensor in tensors]
        self._storages: list[weakref.ref[Any]] | None = None  # after the run
        self._assigned: Mapping[int, frozenset[str]] = habits.assigned if habits else {}
        self._pieces: Pieces | None = None
        self._layouts: dict[Name, Any] = {}
        self._reassigned: list[Piece] = []
        self._kept: list[Piece] | None = None
        if habits is None:
            self._take_all()
        elif habits.changed or habits.reassigned:
            self._take(habits)
        devices = {tensor.device for tensor in arguments if not tensor.is_cpu}
        devices.update([tensor.device for tensor in tensors if not tensor.is_cpu])
        self._environment = Environment(
            devices, host_random=habits is None or habits.host_random, generators=scope.generators
        )
        self._given_away = False  # the old values themselves, to a rerun that may have changed them

    def _named(self, wanted: Collection[int] | None = None) -> Iterator[tuple[Name, torch.Tensor, Any]]:
        """Every tensor that a copy can be taken of, with its name and storage; of the `wanted` storages, by id."""
        for (position, key, tensor), storage in zip(self._scope.tensors, self._held[0], strict=True):
            if (wanted is None or id(storage) in wanted) and not (is_stand_in(tensor) or _is_sharded(tensor)):
                yield (position, key), tensor, storage
        for index, (tensor, storage) in enumerate(zip(self._arguments, self._held[1], strict=True)):
            if wanted is None or id(storage) in wanted:
                yield index, tensor, storage

    def _take_all(self) -> None:
        """Before a first run, of which everything is to be learned."""
        named = list(self._named())
        self._pieces = Pieces(named)
        for name, tensor, storage in named:
            if isinstance(name, int):
                is_candidate = not tensor.is_leaf or not tensor.requires_grad
            else:
                is_candidate = not isinstance(tensor, nn.Parameter)
            if is_candidate:
                with unrecorded(), torch.no_grad():
                    self._pieces.of(storage, tensor).take()
        self._layouts = {name: _layout(tensor) for name, tensor, _ in named if isinstance(tensor, nn.Parameter)}

    def _take(self, habits: Habits) -> None:
        """Before a later run: what the first one changed, by whatever other names it has by now."""
        changed = habits.changed
        wanted = {
            id(storage)
            for (position, key, _), storage in zip(self._scope.tensors, self._held[0], strict=True)
            if (position, key) in changed
        }
        wanted.update([id(storage) for index, storage in enumerate(self._held[1]) if index in changed])
        named = list(self._named(wanted))
        self._pieces = Pieces(named)
        with unrecorded(), torch.no_grad():
            for name, tensor, storage in named:
                if name in changed:
                    self._pieces.of(storage, tensor).take()
        if habits.reassigned:
            for name, tensor, _ in self._named():
                if name in habits.reassigned and name not in habits.changed:
                    self._layouts[name] = _layout(tensor)

    def watching(self) -> AbstractContextManager[Any]:
        """What a first run is to be run in: it sees the changes that version counters do not show."""
        return Writes(self._before_write) if self.is_watched else nullcontext()

    @property
    def is_watched(self) -> bool:
        """Whether the run is watched. Operators may save other tensors then, so a rerun has to be, too."""
        return self._first and not simulating()

    def _before_write(self, tensor: torch.Tensor) -> None:
        if self._pieces is not None:
            for piece in self._pieces.within(tensor):
                piece.written = True
                with unrecorded(), torch.no_grad():
                    piece.take()

    def pieces(self) -> list[Piece]:
        """What there are old values of: after the run only what it changed."""
        if self._kept is not None:
            return self._kept
        return [*(self._pieces.copied() if self._pieces is not None else ()), *self._reassigned]

    def replaced(self) -> dict[int, torch.Tensor]:
        """The old values of arguments that are known by no other name."""
        return {index: piece.old() for piece in self.pieces() if (index := piece.argument) is not None}

    def take_replaced(self) -> dict[int, torch.Tensor]:
        """The same, which are let go of here."""
        replaced = self.replaced()
        self._kept = [piece for piece in self.pieces() if piece.argument is None]
        return replaced

    def conclude(self, argument_versions: list[int]) -> Habits | None:
        """After the run: keep copies of what changed only, and say what was learned on a first run.

        Raises:
            CorrectnessError: something changed in place of which no copy was taken, so that a recompute would
                start from the wrong value.
        """
        self._environment.conclude()
        self._find_reassigned()
        kept = self._changed_pieces(argument_versions)
        self._kept = [*kept, *self._reassigned]
        for piece in self._kept:
            piece.let_go()
        given = frozenset(name for piece in self._reassigned for name in piece.names)
        self._pieces, self._held, self._arguments, self._layouts = None, ([], []), [], {}
        self._let_go_of_stand_ins()
        if not self._first:
            return None
        self._assigned = self._assigned_attributes()
        changed = frozenset(name for piece in kept for name in piece.names)
        return Habits(changed, given, self._environment.uses_host_random, self._assigned)

    def _assigned_attributes(self) -> dict[int, frozenset[str]]:
        found = {}
        for position, (place, content) in enumerate(zip(self._scope.places, self._scope.contents, strict=True)):
            if type(place) is Attributes and not holds(place, content):
                found[position] = frozenset(_differing(content, read(place)))
        return found

    def _let_go_of_stand_ins(self) -> None:
        """Keep a note in place of each tensor that stands here for a value which lives elsewhere."""
        scope = self._scope
        kept = [not is_stand_in(tensor) for _, _, tensor in scope.tensors]
        if not all(kept):
            for keep, (position, key, tensor) in zip(kept, scope.tensors, strict=True):
                if not keep:
                    note = scope.contents[position][key] = origin_of(tensor).note(tensor)
                    self._notes.append(note)
            scope.tensors = list(compress(scope.tensors, kept))
            self._versions = list(compress(self._versions, kept))
            self._trained = list(compress(self._trained, kept))
        # Now and not before the run, in which a transform inside may have moved parameters to another tier.
        # PyTorch makes one Python object for a storage and keeps it for as long as the storage lives.
        self._storages = [weakref.ref(storage) for storage in storages([tensor for _, _, tensor in scope.tensors])]

    def _find_reassigned(self) -> None:
        """Keep what was there before the region assigned `tensor.data`."""
        tensors = [tensor for _, _, tensor in self._scope.tensors]
        found: dict[int, tuple[torch.Tensor, Any, list[Name]]] = {}
        for index in assigned(tensors, self._held[0]):
            position, key, tensor = self._scope.tensors[index]
            if not (is_stand_in(tensor) or _is_sharded(tensor)):
                found.setdefault(id(tensor), (tensor, self._held[0][index], []))[2].append((position, key))
        for index in assigned(self._arguments, self._held[1]):
            tensor = self._arguments[index]
            found.setdefault(id(tensor), (tensor, self._held[1][index], []))[2].append(index)
        copied = {name: piece for piece in self.pieces() for name in piece.names} if found else {}
        for tensor, storage, names in found.values():
            if (piece := copied.get(names[0])) is not None:
                piece.written = True
            elif (layout := self._layouts.get(names[0])) is not None:
                with unrecorded(), torch.no_grad():
                    then = tensor.new_empty(0, dtype=layout[0], device=storage.device).set_(storage, *layout[1:])
                    then.requires_grad_(tensor.requires_grad)
                    self._reassigned.append(Piece([(then, names)]).take())
            else:
                raise self._lost(names[0], "through .data")

    def _changed_pieces(self, argument_versions: list[int]) -> list[Piece]:
        """The pieces that the run has changed, as far as that can be seen."""
        now = versions([tensor for _, _, tensor in self._scope.tensors])
        now_of_arguments = versions(self._arguments)
        names: list[Name] = []
        if now != self._versions:
            names += [
                (position, key)
                for (position, key, _), old, new in zip(self._scope.tensors, self._versions, now, strict=True)
                if old != new
            ]
            self._versions = now
        if now_of_arguments != argument_versions:
            names += [i for i, new in enumerate(now_of_arguments) if new != argument_versions[i]]
        copied = [piece for piece in self.pieces() if piece not in self._reassigned]
        of_name = {name: piece for piece in copied for name in piece.names}
        if lost := [name for name in names if name not in of_name]:
            raise self._lost(lost[0], "in place")
        if not self._first:
            return copied  # habits: kernels such as batch_norm do not bump the version
        seen = {id(of_name[name]) for name in names}
        return [piece for piece in copied if id(piece) in seen or piece.written or not self._same(piece)]

    def _lost(self, name: Name, how: str) -> CorrectnessError:
        """The error about a change of what was not copied."""
        problem = self._pieces and self._pieces.problem_of(name)
        if problem:
            return CorrectnessError(
                f"the region changed {self._title(name)} {how} while it ran, {problem}; a recompute cannot repeat "
                "that. Clone one of them before the region"
            )
        return CorrectnessError(
            f"the region changed {self._title(name)} {how} while it ran, which it had not done on an earlier call, so "
            "its old value is gone and a recompute would start from the changed one; make the change outside the "
            "region, or replace the tensor instead of changing it"
        )

    def _title(self, name: Name) -> str:
        return f"its tensor argument {name}" if isinstance(name, int) else self._scope.describe(*name)

    def _same(self, piece: Piece) -> bool:
        """Whether `piece` still has its old values; asked on a first run only, for it waits for the device."""
        if all(isinstance(name, int) for name in piece.names):
            return True
        for tensor, old in piece.pairs():
            if simulating() or isinstance(tensor, FakeTensor) or tensor.is_meta:
                # No values to compare: fall back on the one family of kernels that changes buffers unseen.
                if any(
                    isinstance(module, _NormBase) and module.training and any(tensor is b for b in module.buffers())
                    for module in self._scope.modules
                ):
                    return False
                continue
            with unrecorded(), torch.no_grad():
                if not (torch.equal(old, tensor) or bool(((old == tensor) | (old.isnan() & tensor.isnan())).all())):
                    return False
        return True

    @contextmanager
    def reinstate(
        self, *, last: bool, refused: dict[int, str], fresh: list[torch.Tensor], made: set[int]
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Run the body as if no time had passed since the snapshot; afterwards everything is as it was before.

        Yields the arguments that the region changes and also has by other names, made again with these.

        `last` says that no other rerun will follow this one if it succeeds, so that it may change the old values
        themselves. `refused` are the storages of changed arguments, each with what to say if the rerun uses it.
        `fresh` receives the tensors that the rerun may change: their version counters start anew. `made`
        receives the storages that the rerun makes, where it runs under a dispatch mode and the run did not.

        Raises:
            CorrectnessError: a tensor that the region depends on was changed in place since, if only by a last rerun
                that failed.
        """
        scope = self._scope
        changed = {**self._changed_since(), **refused}
        before: list[tuple[Place, Content]] = []
        undo: list[Callable[[], Any]] = []
        stand_ins: AbstractContextManager[Mapping[Note, torch.Tensor]] = nullcontext({})
        if self._notes:
            stand_ins = self._notes[0].bring_back(self._notes)
        with stand_ins as arrived, my_turn() if scope.shared or self._environment.draws else nullcontext():
            renewed = self._old_values(last=last)
            fresh.extend(renewed.values())
            try:
                self._go_back(self._trained_as_then(renewed), arrived, before, undo)
                self._environment.enter(undo)
                # Under a mode, which the run was not, operators may leave other versions: those are told by `made`.
                watched = not self._environment.dispatched and modes().dispatched
                with _ChangedWatch(changed, made) if changed or watched else nullcontext(), self.watching():
                    yield {name: tensor for name, tensor in renewed.items() if isinstance(name, int)}
            finally:
                for step in reversed(undo):
                    step()
                for place, content in before:
                    if not holds(place, content):
                        write(place, content)

    def _go_back(
        self,
        renewed: dict[Name, torch.Tensor],
        arrived: Mapping[Note, torch.Tensor],
        before: list[tuple[Place, Content]],
        undo: list[Callable[[], Any]],
    ) -> None:
        """Let every place hold for this thread what it held then; what the rerun may leave is undone by `before`."""
        scope = self._scope
        touched = {name[0] for name in renewed if not isinstance(name, int)}
        owners: dict[int, tuple[nn.Module, str]] | None = None
        for position, (place, content) in enumerate(zip(scope.places, scope.contents, strict=True)):
            if position not in touched and position not in self._assigned and holds(place, content):
                before.append((place, content))
                continue
            if owners is None:
                owners = _owners(scope)
            present = read(place)
            then = self._content_for_rerun(position, renewed, arrived)
            module, table = owners.get(id(real(getattr(place, "mapping", place))), (None, ""))
            if module is None:
                before.append((place, present))
                write(place, then)
            elif table:
                undo.append(see_table(module, table, then))  # type: ignore[arg-type]
            else:
                names = [*_differing(then, present), *self._assigned.get(position, ())]
                seen = {name: then.get(name, ABSENT) for name in names if can_see(module, name)}  # type: ignore[union-attr]
                rest = {name: value for name, value in then.items() if name not in seen}  # type: ignore[union-attr]
                undo.append(partial(_put_back_rest, place, present, seen.keys()))
                _put_back_rest(place, rest, seen.keys())
                undo.append(see_attributes(module, seen))
        for module in scope.modules:
            own = module.__dict__
            if (hooks := scope.hooks.get(id(own))) is not None or is_hooked(own):
                for name in HOOKS:
                    then = {} if hooks is None else hooks.get(name, {})
                    if name in own and not holds(own[name], then):
                        undo.append(see_table(module, name, OrderedDict(then)))

    def _trained_as_then(self, renewed: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """`renewed`, and stand-ins for what was frozen or unfrozen since: the region must save again what it saved."""
        if not renewed and [tensor.requires_grad for _, _, tensor in self._scope.tensors] == self._trained:
            return {}
        made: dict[int, torch.Tensor] = {}
        found = dict(renewed)
        for (position, key, tensor), then in zip(self._scope.tensors, self._trained, strict=True):
            if (old_value := renewed.get((position, key))) is not None:
                old_value.requires_grad_(then)
            elif tensor.requires_grad != then:
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor, then)
                found[position, key] = made[id(tensor)]
        return found

    def _old_values(self, *, last: bool) -> dict[Name, torch.Tensor]:
        """What the region changes in place, as it was; for the last rerun not copies, but what is kept here."""
        if self._kept is None:  # in the middle of the run
            self._find_reassigned()
        pieces = [piece for piece in self.pieces() if piece.argument is None]
        if self._given_away:
            raise CorrectnessError(
                "a checkpointed region cannot be recomputed again: its recompute failed in an earlier backward, and it "
                f"may have changed the only copy of {self._title(next(iter(pieces[0].names)))}, which the "
                "region changes in place. Run the forward again; if a backward may fail and be repeated, give it "
                "retain_graph=True, which spares that copy"
            )
        # Said before, not when it fails: an interrupt can come at any moment.
        self._given_away = last and bool(pieces)
        if not pieces:
            return {}
        with unrecorded(), torch.no_grad():
            return {name: tensor for piece in pieces for name, tensor in piece.again(last=last).items()}

    def _content_for_rerun(
        self, position: int, renewed: dict[Name, torch.Tensor], arrived: Mapping[Note, torch.Tensor]
    ) -> Content:
        content = self._scope.contents[position].copy()
        present = read(self._scope.places[position])
        for key, then in content.items() if isinstance(content, dict) else list(enumerate(content)):
            if (other := renewed.get((position, key))) is not None:
                content[key] = other
            elif isinstance(then, Note):
                content[key] = arrived[then]
            elif _is_sharded(then) and isinstance(present, dict):
                # FSDP2 puts sharded and gathered parameters in turn into the same entry; what is there now is right.
                content[key] = present.get(key, then)
        return content

    def _changed_since(self) -> dict[int, str]:
        """The storages that were changed or exchanged since the run, each with what to say if the rerun uses it."""
        tensors = [tensor for _, _, tensor in self._scope.tensors]
        held, now_at = storages(tensors), versions(tensors)
        then = held if self._storages is None else [storage() for storage in self._storages]
        if now_at == self._versions and all(map(operator.is_, held, then)):
            return {}
        changed = {}
        known = {name for piece in self.pieces() for name in piece.names}
        kept = zip(self._scope.tensors, self._versions, now_at, then, held, strict=True)
        for (position, key, tensor), expected, now, old, new in kept:
            if (position, key) in known:
                continue
            if now != expected:
                what = described(self._scope.describe(position, key), tensor.dtype, tensor.shape)
                error = changed_error(what, now, expected, _REMEDY)
            elif old is not new:
                what = described(self._scope.describe(position, key), tensor.dtype, tensor.shape)
                error = CorrectnessError(
                    f"{what} has other memory than in the forward: its .data was assigned in between, which no "
                    f"version counter shows. {_REMEDY}"
                )
            else:
                continue
            changed[tensor.untyped_storage()._cdata] = str(error)
        return changed


_REMEDY = (
    "The checkpointed region would be recomputed with other numbers. Call backward before changing it (an optimizer "
    "step does)"
)


class _ChangedWatch(OperatorWatch):
    """Notes what a rerun makes, and raises `CorrectnessError` when it uses a tensor that was changed in place since.

    Not before: a scope can be wider than the region. A function that captures a whole model to call one block of it
    is right to find that other blocks have moved their statistics on.
    """

    def __init__(self, changed: dict[int, str], made: set[int]) -> None:
        super().__init__()
        self._changed = changed
        self._made = made

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = _storages((args, kwargs))
        for storage in given:
            message = self._changed.get(storage)
            if message is not None:
                raise CorrectnessError(message)
        result = func(*args, **kwargs)
        self._made.update(_storages(result) - given)
        return result


def _storages(tree: Any) -> set[int]:
    tensors = pytrees.tensors(tree)
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    # No alias: where memory may move, another reference to it would keep it.
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def _like(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    other = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad)
        other.__dict__.update(tensor.__dict__)
    return other.requires_grad_(requires_grad)


def _differing(a: Content, b: Content) -> list[str]:
    assert isinstance(a, dict)
    assert isinstance(b, dict)
    return [name for name in {**a, **b} if a.get(name, ABSENT) is not b.get(name, ABSENT)]


def _put_back_rest(place: Place, content: Any, besides: Collection[str]) -> None:
    """Make the attributes that `place` holds those of `content`, but leave those called as in `besides` alone."""
    kept = {name: value for name, value in content.items() if name not in besides}
    kept |= {name: value for name, value in read(place).items() if name in besides}  # type: ignore[union-attr]
    if not holds(place, kept):
        write(place, kept)


def _owners(scope: Scope) -> dict[int, tuple[nn.Module, str]]:
    """Whose dictionaries the places of `scope` are: by id, the module and the name of the dictionary in it.

    None if a module was compiled: compiled code looks at the dictionaries themselves.
    """
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in scope.modules:
        own = module.__dict__
        if own.get("_compiled_call_impl") is not None or "_orig_mod" in own["_modules"]:
            return {}
        owners[id(own)] = module, ""
        owners[id(real(own["_parameters"]))] = module, "_parameters"
        owners[id(real(own["_buffers"]))] = module, "_buffers"
    return owners
