"""A region's dependencies at the moment it runs, of which `replay` makes a recompute's surroundings.

What a region changes while it runs (BatchNorm statistics, a counter, its own input) must start from the old value
when it runs again. Python attributes are remembered by reference. A tensor changed in place has lost its old value
unless it was copied *before*, so the first run of a region, in each combination of train/eval flags, copies every
candidate and learns which ones it changes (`RegionEffects`); later runs copy those only.

A snapshot is taken in every call, and most change nothing: what is done for each tensor, and when nothing was changed,
is written for speed (`benchmarks/bench_checkpoint.py`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale.core import CorrectnessError, changed_error, described, internals, simulating, version, versions
from memscale.regions.alias_groups import AliasGroup, AliasGroups, Name
from memscale.regions.captures import Captures, LastingName
from memscale.regions.environment import Environment, accelerators
from memscale.regions.hidden_changes import Writes, assigned, is_moved, laid_out, layout, memory_of, storages
from memscale.regions.places import holds, read
from memscale.regions.stand_ins import Note, any_stand_in, is_stand_in, origin_of
from memscale.regions.unrecorded import copying_ahead, unrecorded

NOTHING = nullcontext()
_LARGEST_STATISTIC = 1 << 16  # numbers


class RegionEffects(NamedTuple):
    """What a region was seen to do in a watched run: which tensors it changes, and what it draws.

    Tensors that it captures have their lasting names, arguments their numbers.
    """

    changed: frozenset[LastingName | int]
    reassigned: frozenset[LastingName | int]  # through `.data`: the old memory is still there, if somebody holds it
    host_random: bool
    drew: bool  # by operators of PyTorch; what it puts back itself, as `fork_rng` does, shows in no state

    @classmethod
    def of_all(cls, several: Iterable[RegionEffects]) -> RegionEffects:
        """What was seen in any of `several` runs."""
        changed, reassigned, host_random, drew = zip(*several, strict=True)
        return cls(frozenset().union(*changed), frozenset().union(*reassigned), any(host_random), any(drew))


class Snapshot:
    """Captures, environment and argument versions of one call, before it runs.

    Args:
        captures: what the region's function depends on.
        arguments: the tensor arguments of the call, in order.
        effects: what earlier calls learned, `None` on the first.

    Attributes:
        captures: the same. After the run it has notes of tensors that stood for others.
        modules: those of the captures.
        tensors: those of the captures.
        trained: which of these require a gradient.
        environment: random states, flags and modes.
        notes: what the captures has in place of tensors that stood for others, after the run.
        is_first: whether the run is to be learned from.
        given_away: whether a rerun was given the old values themselves, and may have changed them.
        graded: after the run, the tensors whose `.grad` it changed, by a backward of its own say.
    """

    __slots__ = (
        "_before",
        "_everything",
        "_grads",
        "_held",
        "_in_tuples",
        "_kept",
        "_layouts",
        "_leaves",
        "_pieces",
        "_reassigned",
        "_storages",
        "_taken",
        "_versions",
        "captures",
        "environment",
        "given_away",
        "graded",
        "is_first",
        "modules",
        "notes",
        "tensors",
        "trained",
    )

    def __init__(self, captures: Captures, arguments: list[torch.Tensor], effects: RegionEffects | None) -> None:
        self.captures = captures
        self.modules = captures.modules  # which captures that several calls share do not keep alive
        self.is_first = effects is None
        self.tensors = [tensor for _, _, tensor in captures.tensors]
        self.trained = [tensor.requires_grad for tensor in self.tensors]
        self.notes: list[Note] = []
        self._everything = [*self.tensors, *arguments]
        self._before = versions(self._everything)
        # Held until the region has run, so that what it makes cannot get the address of what it replaces.
        self._held = storages(self._everything)
        self._versions = self._before[: len(self.tensors)]  # after the run, those that it left
        self._storages: list[weakref.ref[Any]] | None = None  # after the run
        self._pieces: AliasGroups | None = None
        self._taken: list[AliasGroup] = []
        self._layouts: dict[Name, Any] = {}
        self._reassigned: list[AliasGroup] = []
        self._kept: list[AliasGroup] | None = None
        self._in_tuples: list[tuple[int, Any]] = []  # after the run: what it changed in place, and has by a tuple
        self.given_away = False
        self.graded: list[torch.Tensor] = []
        self._leaves = [each for each in self._everything if each.requires_grad and each.is_leaf]
        self._grads = _gradients(self._leaves)
        if effects is None:
            self._take_all()
        else:
            self._take(effects)
        self.environment = Environment(
            accelerators(self._everything),
            host_random=effects is None or effects.host_random,
            generators=captures.generators,
            drew=effects is not None and effects.drew,
        )

    @property
    def argument_versions(self) -> list[int]:
        """The versions of the arguments before the run."""
        return self._before[len(self.tensors) :]

    def _name(self, index: int) -> Name:
        return self.captures.tensors[index][:2] if index < len(self.tensors) else index - len(self.tensors)

    def _named(self, wanted: Collection[int] | None = None) -> Iterator[tuple[Name, torch.Tensor, Any]]:
        """Every tensor that a copy can be taken of, with its name and storage; of the `wanted` storages, by id."""
        for index, (tensor, storage) in enumerate(zip(self._everything, self._held, strict=True)):
            if wanted is None or id(storage) in wanted:
                name = self._name(index)
                if isinstance(name, int) or (_is_own(tensor) and not self._is_in_tuple(name)):
                    yield name, tensor, storage

    def _is_in_tuple(self, name: tuple[int, Any]) -> bool:
        """Whether the tensor lies in a tuple, into which no old value can be put."""
        return isinstance(self.captures.places[name[0]], tuple)

    def _take_all(self) -> None:
        """Before a first run, of which everything is to be learned."""
        named = list(self._named())
        self._pieces = AliasGroups(named)
        for name, tensor, storage in named:
            if isinstance(name, int):
                is_candidate = not tensor.is_leaf or not tensor.requires_grad
            else:
                is_candidate = not isinstance(tensor, nn.Parameter)
            if is_candidate:
                with copying_ahead(recorded=False):
                    self._pieces.of(storage, tensor).take()
        self._layouts = {name: layout(tensor) for name, tensor, _ in named if isinstance(tensor, nn.Parameter)}

    def _take(self, effects: RegionEffects) -> None:
        """Before a later run: what a watched one changed, by whatever other names it has by now, and small state."""
        held, count = self._held, len(self.tensors)
        looked_at = range(count) if effects.changed else self.captures.small
        found = [index for index in looked_at if self._is_to_be_taken(index, effects.changed)]
        found += [index for index in range(count, len(held)) if index - count in effects.changed]
        if len({id(storage) for storage in held}) == len(held):  # no two share memory
            with copying_ahead(recorded=False):
                self._taken = [
                    AliasGroup([self._everything[index]], {self._name(index): 0}).take()
                    for index in found
                    if index >= count or _is_own(self._everything[index])
                ]
        elif found:
            names = {self._name(index) for index in found}
            named = list(self._named({id(held[index]) for index in found}))
            self._pieces = AliasGroups(named)
            with copying_ahead(recorded=False):
                for name, tensor, storage in named:
                    if name in names:
                        self._pieces.of(storage, tensor).take()
        if effects.reassigned:
            for name, tensor, _ in self._named():
                if self._lasting(name) in effects.reassigned and self._lasting(name) not in effects.changed:
                    self._layouts[name] = layout(tensor)

    def _is_to_be_taken(self, index: int, changed: Collection[LastingName | int]) -> bool:
        """Whether a watched run changed it; or a later one may, with no version counter to tell, as statistics."""
        tensor = self.tensors[index]
        is_statistic = tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() <= _LARGEST_STATISTIC
        if not self.trained[index] and (is_statistic or tensor.dim() == 0):
            return tensor.layout is torch.strided and not self._is_in_tuple(self.captures.tensors[index][:2])
        return bool(changed) and self.captures.lasting_name(*self.captures.tensors[index][:2]) in changed

    def _lasting(self, name: Name) -> LastingName | int:
        return name if isinstance(name, int) else self.captures.lasting_name(*name)

    def watching(self) -> AbstractContextManager[Any]:
        """What a first run is to be run in: it sees the changes that version counters do not show."""
        return self._watching() if self.is_watched else NOTHING

    @contextmanager
    def _watching(self) -> Iterator[None]:
        steps = [optimizer.register_step_pre_hook(_refuse_step) for optimizer in self.captures.optimizers]
        try:
            with Writes(self._before_write, self.environment.noticing):
                yield
        finally:
            for step in steps:
                step.remove()

    @property
    def is_watched(self) -> bool:
        """Whether the run is watched. Operators may save other tensors then, so a rerun has to be, too."""
        return self.is_first

    def _before_write(self, tensor: torch.Tensor) -> None:
        if self._pieces is not None:
            for piece in self._pieces.within(tensor):
                piece.written = True
                with copying_ahead(recorded=False):
                    piece.take()

    @property
    def is_running(self) -> bool:
        """Whether the run is not over: a region that asks for gradients itself is run again in the middle of it."""
        return self._kept is None

    def pieces(self) -> list[AliasGroup]:
        """What there are old values of: after the run only what it changed."""
        return [*self._copied(), *self._reassigned] if self._kept is None else self._kept

    def _copied(self) -> list[AliasGroup]:
        return self._taken if self._pieces is None else self._pieces.copied()

    def replaced(self) -> dict[int, torch.Tensor]:
        """The old values of arguments that are known by no other name."""
        return {index: piece.old() for piece in self.pieces() if (index := piece.argument) is not None}

    def take_replaced(self) -> dict[int, torch.Tensor]:
        """The same, which are let go of here."""
        replaced = self.replaced()
        self._kept = [piece for piece in self.pieces() if piece.argument is None]
        return replaced

    def conclude(self) -> RegionEffects | None:
        """After the run: keep copies of what changed only, and say what was learned on a first run.

        Raises:
            CorrectnessError: something changed in place of which no copy was taken, so that a recompute would
                start from the wrong value.
        """
        self.environment.conclude()
        (now, versions_now), (before, versions_before) = _gradients(self._leaves), self._grads
        if versions_now != versions_before or not all(map(operator.is_, now, before)):
            found = zip(self._leaves, now, before, versions_now, versions_before, strict=True)
            self.graded = [leaf for leaf, new, old, at, then in found if new is not old or at != then]
        self._leaves, self._grads = [], ([], [])
        held = storages(self._everything)
        self.find_reassigned(held)
        kept = self._changed_pieces()
        given = (
            frozenset(self._lasting(name) for piece in self._reassigned for name in piece.names)
            if self._reassigned
            else frozenset()
        )
        self._kept = [*kept, *self._reassigned]
        for piece in self._kept:
            piece.let_go()
        # Now and not before the run, in which a transform inside may have moved parameters to another tier.
        # PyTorch makes one Python object for a storage and keeps it for as long as the storage lives.
        self._storages = [weakref.ref(storage) for storage in held[: len(self.tensors)]]
        self._pieces, self._taken, self._held, self._everything, self._layouts = None, [], [], [], {}
        self._let_go_of_stand_ins()
        if not self.is_first:
            return None
        changed = frozenset(self._lasting(name) for piece in kept for name in piece.names)
        environment = self.environment
        return RegionEffects(changed, given, environment.uses_host_random, environment.drew)

    def changes_beyond_norms(self, effects: RegionEffects) -> bool:
        """Whether a run with these `effects` changes something in place that is no running statistic of a norm."""
        norms = {id(m._buffers) for m in self.modules if isinstance(m, internals.NormBase)}
        captures = self.captures
        of_norms = {label for place, label in zip(captures.places, captures.labels, strict=True) if id(place) in norms}
        return any(isinstance(name, int) or name[0] not in of_norms for name in effects.changed)

    def made_tensors(self) -> bool:
        """Whether the run has left a tensor where none was: a statistic that is made of the first batch and moved from
        then on, say."""
        for place, content in zip(self.captures.places, self.captures.contents, strict=True):
            if not holds(place, content):
                now = read(place)
                before = dict(enumerate(content)) if isinstance(content, list) else content
                for key, value in now.items() if isinstance(now, dict) else enumerate(now):
                    if isinstance(value, torch.Tensor) and not isinstance(before.get(key), torch.Tensor):
                        return True
        return False

    def _let_go_of_stand_ins(self) -> None:
        """Keep a note in place of each tensor that stands here for a value which lives elsewhere."""
        if not any_stand_in(self.tensors):
            return
        kept = [not is_stand_in(tensor) for tensor in self.tensors]
        captures = self.captures = self.captures.exchanged({})  # which others may hold
        for keep, (position, key, tensor) in zip(kept, captures.tensors, strict=True):
            if not keep:
                note = captures.contents[position][key] = origin_of(tensor).note(tensor)
                self.notes.append(note)
        captures.tensors, self.tensors = list(compress(captures.tensors, kept)), list(compress(self.tensors, kept))
        self._versions, self.trained = list(compress(self._versions, kept)), list(compress(self.trained, kept))
        self._storages = list(compress(self._storages or (), kept))

    def find_reassigned(self, held: list[Any] | None = None) -> None:
        """Keep what was there before the region assigned `tensor.data`; `held` are the storages now."""
        found: dict[int, tuple[torch.Tensor, Any, list[Name]]] = {}
        for index in assigned(storages(self._everything) if held is None else held, self._held):
            name, tensor = self._name(index), self._everything[index]
            if isinstance(name, int) or _is_own(tensor):
                found.setdefault(id(tensor), (tensor, self._held[index], []))[2].append(name)
        if not found:
            return
        copied = {name: piece for piece in self.pieces() for name in piece.names}
        for tensor, storage, names in found.values():
            if (piece := copied.get(names[0])) is not None:
                piece.written = True
            elif (lies := self._layouts.get(names[0])) is not None:
                with unrecorded(), torch.no_grad():
                    then = laid_out(storage, lies)
                    then.requires_grad_(tensor.requires_grad)
                    self._reassigned.append(AliasGroup([then], dict.fromkeys(names, 0)).take())
            else:
                raise self._lost(names[0], "through .data")

    def _changed_pieces(self) -> list[AliasGroup]:
        """The pieces that the run has changed, as far as that can be seen."""
        now, names = versions(self._everything), []
        if now != self._before:
            names = [self._name(index) for index, new in enumerate(now) if new != self._before[index]]
            self._versions = now[: len(self.tensors)]
        copied = self._copied()
        of_name = {name: piece for piece in copied for name in piece.names} if names else {}
        lost = [name for name in names if name not in of_name]
        self._in_tuples = [name for name in lost if not isinstance(name, int) and self._is_in_tuple(name)]
        if len(lost) > len(self._in_tuples):
            raise self._lost(next(name for name in lost if name not in self._in_tuples), "in place")
        if not self.is_first:
            return copied  # effects: kernels such as batch_norm do not bump the version
        seen = {id(of_name[name]) for name in names if name in of_name}
        return [piece for piece in copied if id(piece) in seen or piece.written or not self._same(piece)]

    def _lost(self, name: Name, how: str) -> CorrectnessError:
        """The error about a change of what was not copied."""
        problem = self._pieces and self._pieces.problem_of(name)
        if problem:
            return CorrectnessError(
                f"the region changed {self.title(name)} {how} while it ran, {problem}; a recompute cannot repeat "
                "that. Clone one of them before the region"
            )
        if self.is_first:
            return CorrectnessError(
                f"the region changed {self.title(name)} {how} while it ran, and nothing has kept its old value, as of "
                "parameters that offload(what='params') moves or that processes share, and of an argument's .data: a "
                "recompute would start from the changed one; make the change outside the region, or leave checkpoint() "
                "out for it"
            )
        return CorrectnessError(
            f"the region changed {self.title(name)} {how} while it ran, which it had not done on an earlier call, so "
            "its old value is gone and a recompute would start from the changed one; make the change outside the "
            "region, or replace the tensor instead of changing it"
        )

    def title(self, name: Name) -> str:
        """What an error calls the tensor with that name."""
        return f"its tensor argument {name}" if isinstance(name, int) else self.captures.describe(*name)

    def _same(self, piece: AliasGroup) -> bool:
        """Whether `piece` still has its old values; asked on a first run only, for it waits for the device."""
        if all(isinstance(name, int) for name in piece.names):
            return True
        for tensor, old in piece.pairs():
            if tensor.shape != old.shape:  # a statistic that takes its shape from the first batch
                return False
            if simulating() or isinstance(tensor, internals.FakeTensor) or tensor.is_meta:
                # No values to compare: fall back on the one family of kernels that changes buffers unseen.
                if any(
                    isinstance(module, internals.NormBase)
                    and module.training
                    and any(tensor is b for b in module.buffers())
                    for module in self.modules
                ):
                    return False
                continue
            if tensor.layout is not torch.strided:  # PyTorch compares no sparse ones; what changes them counts versions
                continue
            with copying_ahead(recorded=False), torch.no_grad():
                if not (torch.equal(old, tensor) or bool(((old == tensor) | (old.isnan() & tensor.isnan())).all())):
                    return False
        return True

    def changed_since(self) -> dict[int, str]:
        """The storages that were changed or exchanged since the run, each with what to say if a rerun uses it."""
        held, now_at = storages(self.tensors), versions(self.tensors)
        then = held if self._storages is None else [storage() for storage in self._storages]
        changed = {}
        for position, key in self._in_tuples:
            changed[memory_of(self.captures.contents[position][key])] = _IN_A_TUPLE
        if now_at == self._versions and all(map(operator.is_, held, then)):
            return changed
        known = {name for piece in self.pieces() for name in piece.names}
        before = self._storages or [weakref.ref(storage) for storage in held]
        kept = zip(self.captures.tensors, self._versions, now_at, then, held, before, strict=True)
        for (position, key, tensor), expected, now, old, new, reference in kept:
            if (position, key) in known:
                continue
            if now != expected:
                what = described(self.captures.describe(position, key), tensor.dtype, tensor.shape)
                error = changed_error(what, now, expected, _REMEDY)
            elif old is not new and not is_moved(new, reference):
                what = described(self.captures.describe(position, key), tensor.dtype, tensor.shape)
                error = CorrectnessError(
                    f"{what} has other memory than in the forward: its .data was assigned in between, which no "
                    f"version counter shows. {_REMEDY}"
                )
            else:
                continue
            changed[memory_of(tensor)] = str(error)
        return changed


_IN_A_TUPLE = (
    "the region changed a tensor in place that it has in a tuple. A recompute would start from the changed one, since "
    "no old value can be put into a tuple; keep the tensor in a list, or register it as a buffer"
)
_REMEDY = (
    "The checkpointed region would be recomputed with other numbers. Call backward before changing it (an optimizer "
    "step does)"
)


def _refuse_step(optimizer: Any, *_: Any) -> None:
    raise CorrectnessError(
        f"an optimizer, {type(optimizer).__name__}, steps inside of the region, and a recompute can neither repeat "
        "that nor put back its states; take the step outside of the region, or leave checkpoint() out for it"
    )


def _gradients(leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[int]]:
    """The gradient of each leaf and its version."""
    found = [leaf.grad for leaf in leaves]
    return found, [0 if each is None else version(each) for each in found]


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is this process's part of one that several share."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether a copy of `tensor` can be put in its place: it stands for nothing else, and is whole."""
    return not (is_stand_in(tensor) or is_sharded(tensor))
