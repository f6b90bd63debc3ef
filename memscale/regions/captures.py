"""The captures of a function: the state that it reads besides its arguments, found without running it.

A region is recomputed later, after its surroundings may have changed: a closure variable was rebound, a module went to
`eval()`, a counter was increased. A *state slot* is a location of such state: a module's dictionaries, a closure
cell, the globals that the code names, a list or dictionary reached from one of these. A snapshot reads every slot, and
a replay writes the old contents back (`state_slots`).

Covered: modules and everything they register, plain attributes of modules (tensors, numbers, lists, dictionaries,
arrays, functions), closures, defaults, partials, bound methods, random generators, globals named in the code (also in
the code of a module's forward), and functions of the same file. With `follows=True` also plain objects, such as a
configuration, breadth first up to `MOST_FOLLOWED`.
Not covered: state that no attribute holds, such as the position in an open file. `argument_spec` covers the objects
among the arguments.
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from memscale.core import Assembled, TransformError
from memscale.regions.class_cache import cached_by_class
from memscale.regions.code import code_names, code_reached, defaults_of, function_of, global_names
from memscale.regions.contents_check import contents_check
from memscale.regions.environment import global_hooks
from memscale.regions.kinds import Sort, is_followed, is_of_threads, refuse_lazy, sort_of
from memscale.regions.randomness import HostGenerator, is_host_generator
from memscale.regions.stand_ins import any_stand_in, is_own
from memscale.regions.state_slots import (
    CONTAINERS,
    INTERNAL,
    Attributes,
    Content,
    Fields,
    Names,
    StateSlot,
    can_be_written,
    holds,
    number_of_entries,
    read,
    write,
)

# Larger containers and arrays are taken for data (a vocabulary, a dataset), since every call would have to copy them.
LARGEST_CONTAINER = 1024
# Captured objects and the containers in them. Each costs about a microsecond in every call.
MOST_FOLLOWED = 64
_LARGEST_FOLLOWED = 256  # entries of a container that is followed
# Types of a module's attributes that may lead to state; numbers, strings and sizes are compared by identity.
_METHODS = (types.MethodType, types.BuiltinMethodType)  # such as the methods of a generator or of a list
_OF_TORCH = (torch.Generator, torch.optim.Optimizer)
_STATEFUL = (*CONTAINERS, tuple, types.FunctionType, *_METHODS, functools.partial, *_OF_TORCH)
TABLES = ("_parameters", "_buffers", "_modules")  # the dictionaries in which a module registers its children
_PLAIN = {int, float, bool, str, type(None)}  # skipped early: a convolution has five tuples of such values
_FIXED = {"_reversed_padding_repeated_twice"}  # a list of convolutions that PyTorch writes once
_CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS = (*_CALLED, *(name for name in nn.Module().__dict__ if name.startswith("_forward_") and name not in _CALLED))
NOWHERE: dict[str, Any] = {}  # passed as `home`: follow no function into its globals


@cached_by_class
def _is_stateful(kind: Any) -> bool:
    return issubclass(kind, _STATEFUL) or _leads_on(kind)


def is_of_users(value: Any) -> bool:
    """Whether `value`, a function or method, was defined outside of PyTorch; the names in its code are state then."""
    return not str(getattr(value, "__module__", "torch.")).startswith("torch.")


@cached_by_class
def _has_attributes(kind: Any) -> bool:
    """Whether `kind` is a parameter class from outside PyTorch. A call may change the attributes of its instances."""
    return issubclass(kind, nn.Parameter) and not kind.__module__.startswith("torch.")


@cached_by_class
def _leads_on(kind: Any) -> bool:
    """Whether an instance of `kind` has state, or leads to objects with state."""
    return kind is torch.Generator or is_host_generator(kind) or sort_of(kind) is Sort.ARRAY or is_followed(kind)


LastingName = tuple[int, Any]


def _is_not_sealed() -> bool:
    """Returns False: the `is_current` of captures that were not sealed, or were changed since."""
    return False


class SharedCaptures(Exception):
    """Raised by `Captures.include` on sealed captures, which several calls share."""


class Captures:
    """The modules and slots that a function depends on, with a copy of the contents of each slot.

    Args:
        fn: the function.
        reruns: whether the function will run again; `False` if the captures are only read.
        follows: whether to follow plain objects, and to record tuples of tensors.

    Raises:
        TransformError: the function will run again and has state that cannot be restored.

    Attributes:
        slots: the locations of the state.
        labels: a hash of the path to each slot, by position. Later captures of the function have the same labels.
        contents: the contents of each slot, by position.
        tensors: every tensor among the contents, as (position of its slot, key in it, tensor).
        generators: the user's own generators (`torch.Generator`, or a `HostGenerator` for Python's and NumPy's).
        optimizers: the `torch.optim.Optimizer` objects that were reached; their states are not recorded.
        followed: the positions of the slots that belong to followed objects.
        hooks: every dictionary of hooks of the modules, with a copy of its contents.

    Attributes of sealed captures:
        values: the tensors of `tensors`.
        flags: `training` of each module.
        has_stand_ins: whether one of the tensors is a stand-in.
        root: the weak reference to the first module, after `weaken`; else `None`.
        is_current: tells whether every slot still has its recorded contents, so that new captures would be equal.
    """

    def __init__(self, fn: Callable[..., Any], *, reruns: bool = True, follows: bool = False) -> None:
        self._reruns = reruns
        self._follows = follows
        self._met: list[tuple[int, Any]] = []  # (label of the path, object), to be followed by `_follow`
        self.followed: list[int] = []
        self._modules: list[nn.Module] = []
        self.root: weakref.ref[nn.Module] | None = None
        self.slots: list[StateSlot] = []
        self.labels: list[int] = []
        self._at = 0
        self.contents: list[Content] = []
        self.tensors: list[tuple[int, Any, torch.Tensor]] = []
        self.generators: list[torch.Generator | HostGenerator] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.hooks: list[tuple[dict[Any, Any], Content]] = []
        self.is_current: Callable[[], bool] = _is_not_sealed
        self._seen: set[int] = set()
        self._skips_modules = False
        self._copied: tuple[Collection[Any], list[int], list[int]] | None = None
        self._visit(fn, None)
        for table in global_hooks():
            for hook in table.values():
                self._visit_callback(hook)
        self._follow()
        self.flags = tuple([module.training for module in self._modules])

    def describe(self, position: int, key: Any) -> str:
        """Returns the words by which an error names the tensor at `key` of the slot at `position`."""
        slot = self.slots[position]
        for root in self.modules:
            for path, module in root.named_modules():
                full = f"{path}.{key}" if path else str(key)
                if slot is module._parameters:
                    return f"parameter '{full}' of {type(root).__name__}"
                if slot is module._buffers:
                    return f"buffer '{full}' of {type(root).__name__}"
                if getattr(slot, "mapping", None) is module.__dict__:
                    return f"attribute '{full}' of {type(root).__name__}"
        return f"captured tensor '{key}'" if isinstance(key, str) else "a captured tensor"

    def exchanged(self, other: Mapping[int, torch.Tensor]) -> Captures:
        """Returns a copy of the captures with tensors replaced; `other` maps the id of a tensor to its replacement."""
        found = copy.copy(self)
        found.is_current, found._copied = _is_not_sealed, None  # both refer to the tensors before the exchange
        found.contents = [copy.copy(content) for content in self.contents]
        found.tensors = [(position, key, other.get(id(tensor), tensor)) for position, key, tensor in self.tensors]
        for position, key, tensor in found.tensors:
            found.contents[position][key] = tensor
        return found

    def restore(self, present: list[tuple[StateSlot, Content]] | None = None) -> None:
        """Writes the recorded contents back into every slot that has changed. Appends the present ones to `present`."""
        for slot, content in zip(self.slots, self.contents, strict=True):
            if not holds(slot, content):
                if present is not None:
                    present.append((slot, read(slot)))
                write(slot, content)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs the body with the recorded contents in every slot, then writes the present contents back."""
        present: list[tuple[StateSlot, Content]] = []
        try:
            self.restore(present)
            yield
        finally:
            for slot, content in reversed(present):
                write(slot, content)

    def covers(self, thing: Any) -> bool:
        """Whether `thing` is a module, function or container that the captures include."""
        return id(thing) in self._seen

    def include(self, thing: Any) -> None:
        """Adds the captures of `thing`, a module or function among the arguments.

        Raises:
            SharedCaptures: the captures are sealed, so that other calls may hold them.
        """
        if self.is_current is not _is_not_sealed:
            raise SharedCaptures
        self._visit(thing, NOWHERE)
        self._follow()
        self.flags = tuple([module.training for module in self._modules])

    @property
    def modules(self) -> list[nn.Module]:
        """Every module reached, once each."""
        return self._modules if self.root is None else [self.root(), *self._modules]  # type: ignore[list-item]

    def seal(self) -> Captures:
        """Returns the captures, prepared for `is_current`. Must be called before any of the state can change."""
        self.is_current = contents_check([*zip(self.slots, self.contents, strict=True), *self.hooks])
        self.values = [tensor for _, _, tensor in self.tensors]
        self.has_stand_ins = any_stand_in(self.values)
        return self

    def weaken(self, gone: Callable[[Any], None]) -> None:
        """Replaces the reference to the first module by a weak one, whose callback is `gone`."""
        if self._modules:
            self.root = weakref.ref(self._modules[0], gone)
            self._modules = self._modules[1:]

    def copied(self, changed: Collection[Any]) -> tuple[list[int], list[int]]:
        """Returns the indices of the tensors to copy before a run that changes those with the lasting names `changed`.

        The second list has those that a kernel may change without a new version, as running statistics: the other
        tensors with at most one dimension, parameters excluded.
        """
        if self._copied is None or self._copied[0] is not changed:
            own = [
                index
                for index, (position, _, tensor) in enumerate(self.tensors)
                if is_own(tensor) and not isinstance(self.slots[position], tuple)
            ]
            known = {index for index in own if self.lasting_name(*self.tensors[index][:2]) in changed}
            others = [(index, self.values[index]) for index in own if index not in known]
            small = [index for index, each in others if not isinstance(each, nn.Parameter) and each.dim() < 2]
            self._copied = changed, sorted(known), small
        return self._copied[1:]

    @property
    def may_last(self) -> bool:
        """Whether the captures may be kept after the run: the only tensors that they keep alive are parameters and
        registered buffers, and no module has a temporary `forward` that refers back to it.
        """
        forwards = [(module, getattr(module.__dict__.get("forward"), "__dict__", {})) for module in self.modules]
        if any(each is module for module, held in forwards for each in held.values()):
            return False
        tables = set(map(id, chain.from_iterable([(m._parameters, m._buffers) for m in self.modules])))
        return (
            all(
                isinstance(tensor, nn.Parameter) or (id(self.slots[position]) in tables and tensor.grad_fn is None)
                for position, _, tensor in self.tensors
            )
            and not self.has_stand_ins
        )

    def lasting_name(self, position: int, key: Any) -> LastingName:
        """Returns a name of the tensor at `key` of the slot at `position` that later captures of the function share.

        All tensors of a list or dictionary share one name, because the next call may find other entries there.
        """
        is_container = isinstance(self.slots[position], CONTAINERS) and not isinstance(key, str)
        return self.labels[position], None if is_container else key

    def _add(self, slot: StateSlot) -> Content:
        """Records a slot and its tensors, and returns its contents."""
        content = read(slot)
        position = len(self.slots)
        self._put(slot, content, self._at, type(slot).__name__, getattr(slot, "names", None))
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        self.tensors += [(position, key, value) for key, value in entries if isinstance(value, torch.Tensor)]
        return content

    def _put(self, slot: StateSlot, content: Content, *way: Any) -> None:
        self.slots.append(slot)
        self.labels.append(hash(way))
        self.contents.append(content)

    def _visit_each(self, content: Content, home: dict[str, Any] | None) -> None:
        """Visits the contents of the slot that was recorded last."""
        before, label = self._at, self.labels[-1]
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            self._at = hash((label, key))
            self._visit(value, home)
        self._at = before

    def _visit(self, thing: Any, home: dict[str, Any] | None) -> None:
        """Adds the state of `thing`. Functions with the globals `home` are followed; `None` at the top."""
        if isinstance(thing, torch.Tensor) or id(thing) in self._seen:
            return
        kind: Any = type(thing)
        if kind is torch.Generator:
            self._seen.add(id(thing))
            self.generators.append(thing)
        elif is_host_generator(kind):
            self._seen.add(id(thing))
            self.generators.append(HostGenerator(thing))
        elif isinstance(thing, nn.Module):
            if not self._skips_modules:
                self._visit_module(thing)
        elif issubclass(kind, torch.optim.Optimizer):  # left out of `_seen`, as its states are not recorded
            self.optimizers.append(thing)
        elif issubclass(kind, Assembled):
            for part in thing.parts():
                self._visit(part, home)
        elif kind is types.FunctionType:
            self._seen.add(id(thing))
            if thing.__globals__ is home or thing.__closure__ or (home is None and is_of_users(thing)):
                self._visit_function(thing)
        elif kind in _METHODS:
            self._visit_method(thing.__self__, getattr(thing, "__func__", None), home)
        elif kind is functools.partial:
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._visit(part, home)
        elif issubclass(kind, CONTAINERS):
            self._visit_container(thing, home)
        elif sort_of(kind) is Sort.ARRAY:
            if number_of_entries(thing) <= LARGEST_CONTAINER and can_be_written(thing):
                self._seen.add(id(thing))
                self._add(thing)
        elif issubclass(kind, tuple):
            if self._follows and any(isinstance(part, torch.Tensor) for part in thing):
                self._seen.add(id(thing))
                self._add(thing)
            for part in thing:
                self._visit(part, home)
        elif home is None and isinstance(call := inspect.getattr_static(kind, "__call__", None), types.FunctionType):
            self._visit_method(thing, call, home)
        elif self._follows and is_followed(kind):
            self._met.append((self._at, thing))

    def _follow(self) -> None:
        """Adds the plain objects that were met and the objects in them, breadth first; no modules, no functions."""
        met, self._met = self._met, []
        for at, thing in met:  # the list grows during the loop
            if id(thing) in self._seen or len(self.followed) >= MOST_FOLLOWED:
                continue
            kind: Any = type(thing)
            if kind is torch.Generator or is_host_generator(kind) or sort_of(kind) is Sort.ARRAY:
                before = len(self.slots)
                self._visit(thing, NOWHERE)
                self.followed += range(before, len(self.slots))
                continue
            self._seen.add(id(thing))
            slots: list[StateSlot] = [Fields(thing)] if sort_of(kind) is Sort.OBJECT else []
            if issubclass(kind, (*CONTAINERS, tuple)) and len(thing) <= _LARGEST_FOLLOWED:
                slots.append(thing)
            for slot in slots:
                content = read(slot)
                values = content.values() if isinstance(content, dict) else content
                kinds = set(map(type, values)) - _PLAIN
                if any(map(is_of_threads, kinds)):  # other threads use the object, and must not see its old state
                    break
                self.followed.append(position := len(self.slots))
                self._put(slot, content, at, type(slot).__name__)
                for key, value in content.items() if isinstance(content, dict) else enumerate(content):
                    if (kind := type(value)) not in kinds:
                        continue
                    if isinstance(value, torch.Tensor):
                        self.tensors.append((position, key, value))
                    elif _leads_on(kind):
                        met.append((hash((self.labels[-1], key)), value))

    def _visit_module(self, root: nn.Module) -> None:
        stack, slots, tensors = [root], self.slots, self.tensors
        while stack:
            module = stack.pop()
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):
                if self._reruns:
                    raise TransformError(
                        f"the region has a module of TorchScript, {module.original_name}, whose state lives in C++ "
                        "and cannot be restored for a recompute; transform modules without it, or use the Python "
                        "module that was scripted"
                    )
                self._add({**dict(module.named_parameters()), **dict(module.named_buffers())})
                continue
            if self._follows:  # else parameters are only moved, and may get their shapes in the run
                refuse_lazy(module)
            own = module.__dict__
            self._modules.append(module)
            content = {key: value for key, value in own.items() if key not in INTERNAL}
            position = len(slots)
            number = len(self._modules)
            self._put(Attributes(own, len(own) - len(content)), content, number)
            for key, value in content.items():
                kind: Any = type(value)
                if kind in _PLAIN:
                    continue
                if isinstance(value, torch.Tensor):
                    tensors.append((position, key, value))
                elif kind is tuple:
                    if not _PLAIN.issuperset(map(type, value)):
                        self._at = hash((number, key))
                        self._visit(value, NOWHERE)
                elif _is_stateful(kind) and key not in _FIXED:
                    self._at = hash((number, key))
                    if key == "forward" and is_of_users(value):
                        self._visit(value, None)
                    else:
                        self._visit_callback(value)
            self._at = hash(number)
            reached = code_reached(type(module))
            for mapping, names in reached.globals:
                self._visit_names(mapping, names, NOWHERE)
            for function in reached.functions:
                self._visit_container(function.__dict__, NOWHERE)
                self._visit_defaults(function, NOWHERE)
            for at, name in reached.closing:
                if (method := function_of(vars(type(module).__mro__[at]).get(name))) is not None:
                    self._visit_cells(method)
                    self._visit_defaults(method, NOWHERE)
            for at, name in reached.shared:
                self._visit(vars(type(module).__mro__[at]).get(name), NOWHERE)
            for name in TABLES:  # empty ones too: a module may register something when it first runs
                position = len(slots)
                self._put(own[name], content := dict(own[name]), number, name)
                if name == "_modules":
                    stack.extend([child for child in content.values() if child is not None])
                elif content:
                    tensors += [(position, key, value) for key, value in content.items() if value is not None]
                    for key, value in content.items():
                        if _has_attributes(type(value)):  # an 8-bit layer of bitsandbytes deletes some at first
                            self._at = hash((number, key))
                            self._add(Attributes(value.__dict__, 0))
            self._visit_forward_hooks(own)

    def _visit_forward_hooks(self, own: dict[str, Any]) -> None:
        for name in HOOKS:
            if (table := own.get(name)) is not None:
                self.hooks.append((table, dict(table) if table else {}))
        for table in ("_forward_pre_hooks", "_forward_hooks"):
            for number, hook in enumerate(own[table].values()):
                # The hooks of torch (FSDP) are left out: their state must go on from the forward to the recompute.
                if is_of_users(hook):
                    self._at = hash((len(self._modules), table, number))
                    self._visit_callback(hook)

    def _visit_callback(self, thing: Any) -> None:
        """Adds the closure of `thing`, a function held by a module, and the globals in its code, modules excluded.

        A hook whose code names the whole model would otherwise make the model a part of every region.
        """
        self._visit(thing, NOWHERE)
        while isinstance(thing, functools.partial):
            thing = thing.func
        function = getattr(thing, "__func__", thing)
        if isinstance(function, types.FunctionType) and is_of_users(function):
            before, self._skips_modules = self._skips_modules, True
            self._visit_names(function.__globals__, global_names(function.__code__), function.__globals__)
            self._skips_modules = before

    def _visit_function(self, fn: types.FunctionType) -> None:
        home = fn.__globals__
        self._visit_names(home, global_names(fn.__code__), home)
        self._visit_cells(fn, home)
        self._visit_container(fn.__dict__, home)
        self._visit_defaults(fn, home)

    def _visit_defaults(self, fn: types.FunctionType, home: dict[str, Any]) -> None:
        for default in defaults_of(fn):
            if type(default) not in _PLAIN:
                self._visit(default, home)

    def _visit_cells(self, fn: Any, home: dict[str, Any] = NOWHERE) -> None:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        cells.pop("__class__", None)  # the cell that `super()` uses
        at = self._at
        for name, cell in cells.items():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._at = hash((at, name))
                self._visit_each(self._add(cell), home)

    def _visit_method(self, owner: Any, function: Any, home: dict[str, Any] | None) -> None:
        kind: Any = type(owner)
        if isinstance(owner, nn.Module):
            if not self._skips_modules:
                self._visit_module(owner)
            return
        if issubclass(kind, _STATEFUL) or is_host_generator(kind):
            self._visit(owner, home)
        if isinstance(function, types.FunctionType):
            if hasattr(owner, "__dict__") and not isinstance(owner, type):
                self._visit_names(owner.__dict__, code_names(function.__code__), function.__globals__)
            if self._follows and is_followed(kind):
                self._met.append((self._at, owner))
            self._visit(function, home)

    def _visit_names(self, mapping: dict[str, Any], names: tuple[str, ...], home: dict[str, Any]) -> None:
        """Adds the entries of `mapping` with these names, except Python modules and classes."""
        names = tuple([name for name in names if name in mapping or not hasattr(builtins, name)])
        if names:
            self._visit_each(self._add(Names(mapping, names)), home)

    def _visit_container(self, container: Any, home: dict[str, Any] | None) -> None:
        if id(container) in self._seen or len(container) > LARGEST_CONTAINER:
            return
        self._seen.add(id(container))
        self._visit_each(self._add(container), home)
        if (attributes := getattr(container, "__dict__", None)) is not None:  # an instance of a subclass has one
            self._visit_container(attributes, home)
