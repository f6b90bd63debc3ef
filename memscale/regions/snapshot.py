"""A region's dependencies at the moment it ran, and how to bring that moment back for a recompute.

What a region changes while it runs (BatchNorm statistics, a counter, its own input) must start from the old value
when it runs again. Python attributes are remembered by reference. A tensor changed in place has lost its old value
unless it was copied *before*, so the first run of a region, in each combination of train/eval flags, copies every
candidate and learns which ones it changes (`Habits`); later runs copy those only.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.core import pytrees
from memscale.core.errors import CorrectnessError
from memscale.core.simulating import simulating
from memscale.core.versions import changed_error, described, version
from memscale.regions.environment import Environment
from memscale.regions.scope import HOOKS, Attributes, Content, Place, Scope, holds, is_hooked, read, write
from memscale.regions.stand_ins import Note, is_stand_in, origin_of
from memscale.regions.unrecorded import unrecorded
from memscale.regions.views import ABSENT, can_see, my_turn, real, see_attributes, see_table

K = TypeVar("K")
Key = tuple[int, Any]  # (position of a place, key in it)


class Habits(NamedTuple):
    """What a region was seen to do on its first run: which tensors it changes in place, and Python randomness."""

    places: frozenset[Key]
    arguments: frozenset[int]
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
        "_clones",
        "_environment",
        "_first",
        "_given_away",
        "_notes",
        "_scope",
        "_storages",
        "_trained",
        "_versions",
        "replaced",
    )

    def __init__(self, scope: Scope, arguments: list[torch.Tensor], habits: Habits | None) -> None:
        self._first = habits is None
        self._notes: list[Note] = []
        self._scope = scope
        self._arguments = arguments
        self._versions = [version(tensor) for _, _, tensor in scope.tensors]
        self._trained = [tensor.requires_grad for _, _, tensor in scope.tensors]
        self._storages: list[weakref.ref[Any] | None] = [None] * len(scope.tensors)
        self._assigned: Mapping[int, frozenset[str]] = habits.assigned if habits else {}
        self._clones: dict[Key, torch.Tensor] = _copies(
            {
                (position, key): tensor
                for position, key, tensor in scope.tensors
                if ((position, key) in habits.places if habits else not _is_parameter(tensor))
            }
        )
        self.replaced: dict[int, torch.Tensor] = _copies(
            {
                index: tensor
                for index, tensor in enumerate(arguments)
                if (index in habits.arguments if habits else not tensor.is_leaf or not tensor.requires_grad)
            }
        )
        devices = {tensor.device for tensor in arguments if not tensor.is_cpu}
        devices.update([tensor.device for _, _, tensor in scope.tensors if not tensor.is_cpu])
        self._environment = Environment(
            devices, host_random=habits is None or habits.host_random, generators=scope.generators
        )
        self._given_away = False  # the old values themselves, to a rerun that may have changed them

    def settle(self, argument_versions: list[int]) -> Habits | None:
        """After the run: keep copies of what changed only, and say what was learned on a first run.

        After this, `replaced` maps the positions of arguments that the region changed to their old values.

        Raises:
            CorrectnessError: something changed in place of which no copy was taken, so that a recompute would
                start from the wrong value.
        """
        self._environment.settle()
        changed = self._changed_places()
        mutated = {
            index
            for index, (tensor, before) in enumerate(zip(self._arguments, argument_versions, strict=True))
            if version(tensor) != before
        }
        if lost := mutated - self.replaced.keys():
            raise CorrectnessError(
                f"the region changed its tensor argument {min(lost)} in place, which it had not done on an earlier "
                "call, so its old value is gone and a recompute would be wrong; clone that argument inside the region"
            )
        self._check_aliases(mutated)
        self.replaced = {index: self.replaced[index] for index in mutated}
        self._clones = {key: self._clones[key] for key in changed}
        self._arguments = []
        self._let_go_of_stand_ins()
        if not self._first:
            return None
        self._assigned = self._assigned_attributes()
        return Habits(frozenset(changed), frozenset(mutated), self._environment.uses_host_random, self._assigned)

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
        for keep, (position, key, tensor) in zip(kept, scope.tensors, strict=True):
            if not keep:
                note = scope.contents[position][key] = origin_of(tensor).note(tensor)
                self._notes.append(note)
        scope.tensors = list(compress(scope.tensors, kept))
        self._versions = list(compress(self._versions, kept))
        self._trained = list(compress(self._trained, kept))
        # Now and not before the run, in which a transform inside may have moved parameters to another tier.
        self._storages = [_storage(tensor) for _, _, tensor in scope.tensors]

    def _changed_places(self) -> list[Key]:
        changed: list[Key] = []
        lost: list[Key] = []
        for index, (position, key, tensor) in enumerate(self._scope.tensors):
            now = version(tensor)
            clone = self._clones.get((position, key))
            if now == self._versions[index] and (clone is None or not self._first or self._same(clone, tensor)):
                if clone is not None and not self._first:
                    changed.append((position, key))  # a habit: kernels such as batch_norm do not bump the version
                continue
            self._versions[index] = now
            (lost if clone is None else changed).append((position, key))
        if lost:
            raise CorrectnessError(
                f"the region changed {self._scope.describe(*lost[0])} in place while it ran, so a recompute would "
                "start from the changed value; make the change outside the region, or replace the tensor "
                "instead of changing it"
            )
        return changed

    def _same(self, clone: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Whether `tensor` still has the values of `clone`; asked on a first run only, for it waits for the device."""
        if simulating() or isinstance(tensor, FakeTensor) or tensor.is_meta:
            # No values to compare: fall back on the one family of kernels that changes buffers unseen.
            return not any(
                isinstance(module, _NormBase) and module.training and any(tensor is b for b in module.buffers())
                for module in self._scope.modules
            )
        with unrecorded(), torch.no_grad():
            return torch.equal(clone, tensor) or bool(((clone == tensor) | (clone.isnan() & tensor.isnan())).all())

    def _check_aliases(self, mutated: set[int]) -> None:
        for index in mutated:
            storage = self._arguments[index].untyped_storage()._cdata
            for other, tensor in enumerate(self._arguments):
                if tensor is not self._arguments[index] and tensor.untyped_storage()._cdata == storage:
                    raise CorrectnessError(
                        f"the region changed its tensor argument {index} in place, and argument {other} shares its "
                        "memory; a recompute cannot repeat that. Clone one of them before the region"
                    )

    @contextmanager
    def reinstate(self, *, last: bool, refused: dict[int, str], fresh: list[torch.Tensor]) -> Iterator[None]:
        """Run the body as if no time had passed since the snapshot; afterwards everything is as it was before.

        `last` says that no other rerun will follow this one if it succeeds, so that it may change the old values
        themselves. `refused` are the storages of changed arguments, each with what to say if the rerun uses it.
        `fresh` receives the tensors that the rerun may change: their version counters start anew.

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
        with stand_ins as arrived, my_turn() if scope.shared else nullcontext():
            renewed = self._old_values(last=last)
            fresh.extend(renewed.values())
            try:
                self._go_back(self._trained_as_then(renewed), arrived, before, undo)
                self._environment.enter(undo)
                with _RefuseChanged(changed) if changed else nullcontext():
                    yield
            finally:
                for step in reversed(undo):
                    step()
                for place, content in before:
                    if not holds(place, content):
                        write(place, content)

    def _go_back(
        self,
        renewed: dict[Key, torch.Tensor],
        arrived: Mapping[Note, torch.Tensor],
        before: list[tuple[Place, Content]],
        undo: list[Callable[[], Any]],
    ) -> None:
        """Let every place hold for this thread what it held then; what the rerun may leave is undone by `before`."""
        scope = self._scope
        touched = {position for position, _ in renewed}
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

    def _trained_as_then(self, renewed: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """`renewed`, and stand-ins for what was frozen or unfrozen since: the region must save again what it saved."""
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

    def _old_values(self, *, last: bool) -> dict[Key, torch.Tensor]:
        """What the region changes in place, as it was; for the last rerun not copies, but what is kept here."""
        if self._given_away:
            raise CorrectnessError(
                "a checkpointed region cannot be recomputed again: its recompute failed in an earlier backward, and it "
                f"may have changed the only copy of {self._scope.describe(*next(iter(self._clones)))}, which the "
                "region changes in place. Run the forward again; if a backward may fail and be repeated, give it "
                "retain_graph=True, which spares that copy"
            )
        if not last:
            return _copies(self._clones)
        # Said before, not when it fails: an interrupt can come at any moment.
        self._given_away = bool(self._clones)
        return self._clones

    def _content_for_rerun(
        self, position: int, renewed: dict[Key, torch.Tensor], arrived: Mapping[Note, torch.Tensor]
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
        changed = {}
        kept = zip(self._scope.tensors, self._versions, self._storages, strict=True)
        for (position, key, tensor), expected, storage in kept:
            if (position, key) in self._clones:
                continue
            if (now := version(tensor)) != expected:
                what = described(self._scope.describe(position, key), tensor.dtype, tensor.shape)
                error = changed_error(what, now, expected, _REMEDY)
            elif storage is not None and storage() is not tensor.untyped_storage():
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


class _RefuseChanged(TorchDispatchMode):
    """Raises `CorrectnessError` when a rerun uses a tensor that was changed in place since the run.

    Not before: a scope can be wider than the region. A function that captures a whole model to call one block of it
    is right to find that other blocks have moved their statistics on.
    """

    def __init__(self, changed: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytrees.tensors((args, kwargs)):
            message = self._changed.get(tensor.untyped_storage()._cdata)
            if message is not None:
                raise CorrectnessError(message)
        return func(*args, **(kwargs or {}))


def _copies(originals: dict[K, torch.Tensor]) -> dict[K, torch.Tensor]:
    if not originals:
        return {}
    with unrecorded(), torch.no_grad():
        return {key: tensor.clone() for key, tensor in originals.items()}


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or is_stand_in(tensor)


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def _storage(tensor: torch.Tensor) -> weakref.ref[Any] | None:
    # PyTorch makes one Python object for a storage and keeps it for as long as the storage lives.
    return weakref.ref(tensor.untyped_storage()) if tensor.layout is torch.strided else None


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
