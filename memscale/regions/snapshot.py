"""Snapshots: the state that a region depends on, taken before it runs; `replay` restores it for a recompute.

State that the region changes while it runs (BatchNorm statistics, a counter, its own input) must start from the old
value in a recompute. Python attributes are recorded by reference. A tensor changed in place has lost its old value
unless it was copied *before*. So the first run of a region, in each combination of train/eval flags, copies every
candidate and learns which ones it changes (`RegionEffects`); later runs copy only these.

Every call takes a snapshot, and most calls change nothing. The loops over tensors and the unchanged case are therefore
written for speed (`benchmarks/bench_checkpoint.py`).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale.core import CorrectnessError, changed_error, described, internals, simulating, versions
from memscale.regions.alias_groups import AliasGroup, AliasGroups, Name
from memscale.regions.captures import Captures, LastingName
from memscale.regions.environment import Environment, accelerators
from memscale.regions.hidden_changes import Writes, assigned, is_moved, laid_out, layout, memory_of, storages
from memscale.regions.stand_ins import Note, is_own, is_stand_in, origin_of
from memscale.regions.state_slots import holds, read
from memscale.regions.unrecorded import copying_ahead, unrecorded

NOTHING = nullcontext()
_requires_grad = operator.attrgetter("requires_grad")
_is_leaf = operator.attrgetter("is_leaf")
_grad = operator.attrgetter("grad")
_attributes = operator.attrgetter("__dict__")
_exists = partial(operator.is_not, None)
_LARGEST_STATISTIC = 1 << 16  # elements


class RegionEffects(NamedTuple):
    """The effects of a region that a watched run found.

    Attributes:
        changed: the tensors that it changes: a captured tensor by its lasting name, an argument by its index.
        reassigned: the tensors to whose `.data` it assigns, which leaves the old memory intact.
        host_random: whether it draws from Python's or NumPy's generator.
        drew: the ids of PyTorch's generators that it draws from, also where it restores one itself, as `fork_rng` does.
        saved: how many tensors autograd saved in it.
    """

    changed: frozenset[LastingName | int]
    reassigned: frozenset[LastingName | int]
    host_random: bool
    drew: frozenset[int]
    saved: int = 0

    @classmethod
    def of_all(cls, several: Iterable[RegionEffects]) -> RegionEffects:
        """Returns the union of the effects of `several` runs."""
        every = list(several)
        return cls(
            frozenset().union(*(each.changed for each in every)),
            frozenset().union(*(each.reassigned for each in every)),
            any(each.host_random for each in every),
            frozenset().union(*(each.drew for each in every)),
            min(each.saved for each in every),
        )


class Snapshot:
    """Captures, environment and argument versions of one call, before it runs.

    Args:
        captures: what the region's function depends on.
        arguments: the tensor arguments of the call, in order.
        effects: the effects found in earlier calls; `None` on the first call.
        holds_arguments: whether to keep the arguments after the run.

    Attributes:
        captures: the captures. After the run, notes replace the stand-in tensors in them.
        tensors: the tensors of the captures.
        trained: `requires_grad` of each of `tensors`.
        arguments: the arguments, if the snapshot holds them.
        arguments_trained: `requires_grad` of each argument.
        argument_versions: the versions of the arguments before the run.
        environment: random states, flags and modes.
        notes: after the run, the notes that replaced stand-in tensors in the captures.
        is_watched: whether this is a first run, watched in order to find the effects of the region. Its rerun must be
            watched too: under a mode, operators may save other tensors.
        kept: after the run, the alias groups with old values that the region changed; `None` before.
        given_away: whether a rerun got the saved old values without a clone, and may have changed them.
        graded: after the run, the tensors whose `.grad` the region changed, for example by a backward of its own.
    """

    def __init__(
        self,
        captures: Captures,
        arguments: list[torch.Tensor],
        effects: RegionEffects | None,
        *,
        holds_arguments: bool = False,
    ) -> None:
        self.captures = captures
        self._root = captures.root and captures.root()  # kept alive here, since shared captures refer to it weakly
        self.is_watched = effects is None
        self.tensors = captures.values
        self.notes: list[Note] = []
        self.arguments = arguments if holds_arguments else []
        everything, count = [*self.tensors, *arguments], len(self.tensors)
        self._everything = everything
        trained = list(map(_requires_grad, everything))
        self.trained, self.arguments_trained = trained[:count], trained[count:]
        self._before = versions(everything)
        self.argument_versions = self._before[count:]
        # Kept until the region has run, so that no storage that it makes can get the address of one that it replaces.
        self._storages_before = storages(everything)
        self._versions: list[int] = []  # after the run: the versions at its end
        self._storages: list[weakref.ref[Any]] | None = None  # after the run: the storages at its end
        self._groups: AliasGroups | None = None
        self._copied_groups: list[AliasGroup] = []
        self._layouts: dict[Name, Any] = {}
        self._reassigned: list[AliasGroup] = []
        self.kept: list[AliasGroup] | None = None
        self._in_tuples: list[tuple[int, Any]] = []  # after the run: the tensors in tuples that it changed in place
        self.given_away = False
        self.graded: list[torch.Tensor] = []
        self._leaves = list(filter(_is_leaf, compress(everything, trained)))
        self._grads = list(map(_grad, self._leaves))
        self._grad_versions = versions(list(filter(_exists, self._grads))) if any(map(_exists, self._grads)) else []
        if effects is None:
            self._take_all()
        else:
            self._take(effects)
        self.environment = Environment(
            accelerators(self._everything),
            host_random=effects is None or effects.host_random,
            generators=captures.generators,
            drew=frozenset() if effects is None else effects.drew,
        )

    def _name(self, index: int) -> Name:
        return self.captures.tensors[index][:2] if index < len(self.tensors) else index - len(self.tensors)

    def _named_tensors(self, wanted: Collection[int] | None = None) -> Iterator[tuple[Name, torch.Tensor, Any]]:
        """Yields (name, tensor, storage) of every tensor that can be copied, in the storages with the ids `wanted`."""
        for index, (tensor, storage) in enumerate(zip(self._everything, self._storages_before, strict=True)):
            if wanted is None or id(storage) in wanted:
                name = self._name(index)
                if isinstance(name, int) or (is_own(tensor) and not self._is_in_tuple(name)):
                    yield name, tensor, storage

    def _is_in_tuple(self, name: tuple[int, Any]) -> bool:
        """Whether the tensor is an item of a tuple, which a replay cannot write to."""
        return isinstance(self.captures.slots[name[0]], tuple)

    def _take_all(self) -> None:
        """Copies every candidate, before a first run."""
        named = list(self._named_tensors())
        self._groups = AliasGroups(named)
        for name, tensor, storage in named:
            if isinstance(name, int):
                is_candidate = not tensor.is_leaf or not tensor.requires_grad
            else:
                is_candidate = not isinstance(tensor, nn.Parameter)
            if is_candidate:
                with copying_ahead(recorded=False):
                    self._groups.of(storage, tensor).take()
        self._layouts = {name: layout(tensor) for name, tensor, _ in named if isinstance(tensor, nn.Parameter)}

    def _take(self, effects: RegionEffects) -> None:
        """Copies, before a later run, the tensors that the watched run changed, their alias groups, and small state."""
        held, count = self._storages_before, len(self.tensors)
        changed, small = self.captures.copied(effects.changed)
        found = [*changed, *(index for index in small if self._is_statistic(index))] if small else changed
        if effects.changed:
            found = [*found, *(index for index in range(count, len(held)) if index - count in effects.changed)]
        if found and len({id(storage) for storage in held}) == len(held):  # no two tensors share memory
            with copying_ahead(recorded=False):
                self._copied_groups = [
                    AliasGroup([self._everything[index]], [self._name(index)]).take() for index in found
                ]
        elif found:
            names = {self._name(index) for index in found}
            named = list(self._named_tensors({id(held[index]) for index in found}))
            self._groups = AliasGroups(named)
            with copying_ahead(recorded=False):
                for name, tensor, storage in named:
                    if name in names:
                        self._groups.of(storage, tensor).take()
        if effects.reassigned:
            for name, tensor, _ in self._named_tensors():
                if self._lasting(name) in effects.reassigned and self._lasting(name) not in effects.changed:
                    self._layouts[name] = layout(tensor)

    def _is_statistic(self, index: int) -> bool:
        """Whether tensor `index` is like a running statistic, which a kernel can change without a new version."""
        tensor = self.tensors[index]
        is_vector = tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() <= _LARGEST_STATISTIC
        return not self.trained[index] and (is_vector or tensor.dim() == 0) and tensor.layout is torch.strided

    def _lasting(self, name: Name) -> LastingName | int:
        return name if isinstance(name, int) else self.captures.lasting_name(*name)

    def watching(self) -> AbstractContextManager[Any]:
        """Returns the context for the run. A first run is watched for changes that leave no new version."""
        return self._watching() if self.is_watched else NOTHING

    @contextmanager
    def _watching(self) -> Iterator[None]:
        steps = [optimizer.register_step_pre_hook(_refuse_step) for optimizer in self.captures.optimizers]
        try:
            with Writes(self._before_write, self.environment.watch_draws):
                yield
        finally:
            for step in steps:
                step.remove()

    def _before_write(self, tensor: torch.Tensor) -> None:
        if self._groups is not None:
            for group in self._groups.within(tensor):
                group.written = True
                with copying_ahead(recorded=False):
                    group.take()

    @property
    def is_running(self) -> bool:
        """Whether the run is still going on. A region that computes gradients itself is recomputed during its run."""
        return self.kept is None

    def groups(self) -> list[AliasGroup]:
        """Returns the alias groups with old values; after the run, only those that the region changed."""
        return [*self._copied(), *self._reassigned] if self.kept is None else self.kept

    def _copied(self) -> list[AliasGroup]:
        if self._groups is None:
            return self._copied_groups
        return [group for group in self._groups.every() if group.is_copied]

    def replaced(self) -> dict[int, torch.Tensor]:
        """Returns the old values of changed arguments without another name, by argument index."""
        return {index: group.old() for group in self.groups() if (index := group.argument) is not None}

    def take_replaced(self) -> dict[int, torch.Tensor]:
        """Returns `replaced()` and drops the references to these values."""
        replaced = self.replaced()
        self.kept = [group for group in self.groups() if group.argument is None]
        return replaced

    def conclude(self) -> RegionEffects | None:
        """Drops, after the run, the copies of unchanged tensors. Returns the effects found by a first run, else `None`.

        Raises:
            CorrectnessError: a tensor without a copy changed in place, so that a recompute would start from the wrong
                value.
        """
        self.environment.conclude()
        grads = list(map(_grad, self._leaves))
        if self._grad_versions or not all(map(operator.is_, grads, self._grads)):
            self.graded = self._find_graded(grads)
        everything, count = self._everything, len(self.tensors)
        held, now = storages(everything), versions(everything)
        self._versions = now[:count]
        if not all(map(operator.is_, held, self._storages_before)):
            self.find_reassigned(held)
        kept = self._copied() if self._groups else self._copied_groups
        if now != self._before or self.is_watched:
            kept = self._changed_groups(now)
        self.kept = [*kept, *self._reassigned]
        for group in self.kept:
            group.let_go()
        # Taken after the run, since a transform inside may have moved parameters to another tier during it.
        # A weak reference suffices: PyTorch keeps the one Python object of a storage as long as the storage lives.
        self._storages = list(map(weakref.ref, held[:count]))
        reassigned, self._reassigned = self._reassigned, []
        self._groups, self._copied_groups, self._layouts = None, [], {}
        self._storages_before, self._everything, self._leaves, self._grads = [], [], [], []
        if self.captures.has_stand_ins:
            self._let_go_of_stand_ins()
        if not self.is_watched:
            return None
        changed, given = (
            frozenset(self._lasting(name) for group in groups for name in group.names) for groups in (kept, reassigned)
        )
        environment = self.environment
        return RegionEffects(
            changed,
            given,
            host_random=environment.uses_host_random,
            drew=environment.drew,
        )

    def _find_graded(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Returns the leaves whose `.grad` the run has replaced by those in `grads`, or changed in place."""
        now = iter(versions(list(filter(_exists, self._grads))))
        then = iter(self._grad_versions)
        found = []
        for leaf, grad, before in zip(self._leaves, grads, self._grads, strict=True):
            is_changed = before is not None and next(now) != next(then)
            if is_changed or grad is not before:
                found.append(leaf)
        return found

    def made_tensors(self) -> bool:
        """Whether the run put a tensor where there was none, such as a statistic made from the first batch."""
        for slot, content in zip(self.captures.slots, self.captures.contents, strict=True):
            if not holds(slot, content):
                now = read(slot)
                before = dict(enumerate(content)) if isinstance(content, list) else content
                for key, value in now.items() if isinstance(now, dict) else enumerate(now):
                    if isinstance(value, torch.Tensor) and not isinstance(before.get(key), torch.Tensor):
                        return True
        return False

    def _let_go_of_stand_ins(self) -> None:
        """Replaces each stand-in tensor in the captures by a note of the value that it stood for."""
        kept = [not is_stand_in(tensor) for tensor in self.tensors]
        captures = self.captures = self.captures.exchanged({})  # a copy, for other calls may share the captures
        for keep, (position, key, tensor) in zip(kept, captures.tensors, strict=True):
            if not keep:
                note = captures.contents[position][key] = origin_of(tensor).note(tensor)
                self.notes.append(note)
        captures.tensors, self.tensors = list(compress(captures.tensors, kept)), list(compress(self.tensors, kept))
        captures.values = self.tensors
        self._versions, self.trained = list(compress(self._versions, kept)), list(compress(self.trained, kept))
        self._storages = list(compress(self._storages or (), kept))

    def find_reassigned(self, held: list[Any] | None = None) -> None:
        """Saves the old memory of the tensors whose `.data` the region assigned; `held` are the present storages."""
        found: dict[int, tuple[torch.Tensor, Any, list[Name]]] = {}
        for index in assigned(storages(self._everything) if held is None else held, self._storages_before):
            name, tensor = self._name(index), self._everything[index]
            if isinstance(name, int) or is_own(tensor):
                found.setdefault(id(tensor), (tensor, self._storages_before[index], []))[2].append(name)
        if not found:
            return
        copied = {name: group for group in self.groups() for name in group.names}
        for tensor, storage, names in found.values():
            if (group := copied.get(names[0])) is not None:
                group.written = True
            elif (lies := self._layouts.get(names[0])) is not None:
                with unrecorded(), torch.no_grad():
                    then = laid_out(storage, lies)
                    then.requires_grad_(tensor.requires_grad)
                    self._reassigned.append(AliasGroup([then], names).take())
            else:
                raise self._lost(names[0], "through .data")

    def _changed_groups(self, now: list[int]) -> list[AliasGroup]:
        """Returns the copied groups that the run changed; in later runs all copied groups. `now` are the versions."""
        names = [self._name(index) for index, new in enumerate(now) if new != self._before[index]]
        copied = self._copied()
        of_name = {name: group for group in copied for name in group.names} if names else {}
        lost = [name for name in names if name not in of_name]
        self._in_tuples = [name for name in lost if not isinstance(name, int) and self._is_in_tuple(name)]
        # A kernel such as `batch_norm` writes without a new version.
        lost += [group.names[0] for group in self._overlapping() if group.written]
        if len(lost) > len(self._in_tuples):
            raise self._lost(next(name for name in lost if name not in self._in_tuples), "in place")
        if not self.is_watched:
            return copied  # all of them, since kernels such as batch_norm change tensors without a new version
        seen = {id(of_name[name]) for name in names if name in of_name}
        return [group for group in copied if id(group) in seen or group.written or not self._same(group)]

    def _overlapping(self) -> list[AliasGroup]:
        return [group for group in self._groups.every() if len(group.tensors) > 1] if self._groups else []

    def _lost(self, name: Name, how: str) -> CorrectnessError:
        """Returns the error about a change of a tensor without a copy."""
        if any(name in group.names for group in self._overlapping()):
            return CorrectnessError(
                f"the region changed {self.title(name)} {how} while it ran, which it also reaches by a view of the "
                "same memory; a recompute cannot repeat the change under both names. Clone one of the two tensors "
                "before the region, or make the view inside the region"
            )
        if self.is_watched:
            return CorrectnessError(
                f"the region changed {self.title(name)} {how} while it ran, and nothing has kept its old value, so a "
                "recompute would start from the changed value. (No copy exists of parameters that "
                "offload(what='params') moves or that processes share, and of an argument's .data.) Make the change "
                "outside the region, or do not checkpoint this region"
            )
        return CorrectnessError(
            f"the region changed {self.title(name)} {how} while it ran, which it had not done on an earlier call, so "
            "no copy of its old value exists and a recompute would start from the changed value; make the change "
            "outside the region, or replace the tensor instead of changing it"
        )

    def title(self, name: Name) -> str:
        """Returns the words by which an error names the tensor `name`."""
        return f"its tensor argument {name}" if isinstance(name, int) else self.captures.describe(*name)

    def _same(self, group: AliasGroup) -> bool:
        """Whether `group` still has its old values. For first runs only, since the comparison waits for the device."""
        if all(isinstance(name, int) for name in group.names):
            return True
        tensor, old = group.tensors[0], group.old()
        if tensor.shape != old.shape:  # such as a statistic that takes its shape from the first batch
            return False
        if simulating() or isinstance(tensor, internals.FakeTensor) or tensor.is_meta:
            # Without values to compare, assume a change where norms in training mode update their buffers.
            norms = [each for each in self.captures.modules if isinstance(each, internals.NormBase) and each.training]
            return not any(tensor is buffer for norm in norms for buffer in norm.buffers())
        if tensor.layout is not torch.strided:  # PyTorch cannot compare sparse tensors; their versions suffice
            return True
        with copying_ahead(recorded=False), torch.no_grad():
            return torch.equal(old, tensor) or bool(((old == tensor) | (old.isnan() & tensor.isnan())).all())

    def are_arguments_unchanged(self) -> bool:
        """Whether a rerun may be given the arguments themselves."""
        arguments = self.arguments
        return (
            versions(arguments) == self.argument_versions
            and list(map(_requires_grad, arguments)) == self.arguments_trained
            and not any(map(_attributes, arguments))
            and not (self.kept and any(group.shares_argument for group in self.kept))
        )

    def is_present(self) -> bool:
        """Whether a rerun needs nothing restored but the environment: all state is still as the run found it."""
        # `changed_since` comes last, for it compares every tensor.
        return not (self.is_watched or self.kept != [] or self.notes or self.graded) and (
            self.captures.is_current()
            and list(map(_requires_grad, self.tensors)) == self.trained
            and not self.changed_since()
        )

    def changed_since(self) -> dict[int, str]:
        """Maps each storage that was changed or exchanged since the run to the message to raise if a rerun uses it."""
        held, now_at = storages(self.tensors), versions(self.tensors)
        then = held if self._storages is None else [reference() for reference in self._storages]
        expected = self._before[: len(held)] if self._storages is None else self._versions
        is_unchanged = now_at == expected and all(map(operator.is_, held, then))
        if is_unchanged and not self._in_tuples:
            return {}
        changed = {memory_of(self.captures.contents[at][key]): _IN_A_TUPLE for at, key in self._in_tuples}
        if is_unchanged:
            return changed
        known = {name for group in self.groups() for name in group.names}
        before = self._storages or [weakref.ref(storage) for storage in held]
        kept = zip(self.captures.tensors, expected, now_at, then, held, before, strict=True)
        for (position, key, tensor), version_then, now, old, new, reference in kept:
            if (position, key) in known:
                continue
            if now != version_then and any((position, key) in group.names for group in self._overlapping()):
                error = self._lost((position, key), "in place")
            elif now != version_then:
                what = described(self.captures.describe(position, key), tensor.dtype, tensor.shape)
                error = changed_error(what, now, version_then, _REMEDY)
            elif old is not new and not is_moved(new, reference):
                what = described(self.captures.describe(position, key), tensor.dtype, tensor.shape)
                error = CorrectnessError(
                    f"{what} has other memory than in the forward: its .data was assigned since, which its version "
                    f"counter does not show. {_REMEDY}"
                )
            else:
                continue
            changed[memory_of(tensor)] = str(error)
        return changed


_IN_A_TUPLE = (
    "the region changed a tensor in place that it has in a tuple. A recompute would start from the changed value, and "
    "cannot write the old tensor into the tuple; keep the tensor in a list, or register it as a buffer"
)
_REMEDY = (
    "The checkpointed region would be recomputed with other numbers. Call backward before any code changes the tensor, "
    "such as an optimizer step"
)


def _refuse_step(optimizer: Any, *_: Any) -> None:
    raise CorrectnessError(
        f"an optimizer, {type(optimizer).__name__}, steps inside of the region, and a recompute would repeat the step; "
        "take the step outside of the region, or do not checkpoint this region"
    )
