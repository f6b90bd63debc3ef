"""What a function depends on besides its arguments, found without running it.

A region is recomputed later, when the world around it has moved on: a closure variable was rebound, a module went to
`eval()`, a counter counted. A *place* is a spot where such a dependency is stored: a module's dictionaries, a
closure cell, the globals that the code names, a list or dictionary reached from one of these. Places can be read and
written back (`places`), which is all that a snapshot needs.

Found: modules and everything they register, plain attributes of modules (tensors, numbers, lists, dictionaries,
functions), closures, defaults, partials, bound methods, random generators, globals named in the code (that of a
module's forward too), and functions of the same file.
Whoever runs a region again follows the plain objects that it captures, too, such as a configuration, the nearest first.
Not found: what no attribute shows, such as where an open file is. Objects that the region is given are those of
`remembered`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.core import Assembled, TransformError
from memscale.regions.by_class import by_class
from memscale.regions.code import closes_over, code_names, code_places, global_names
from memscale.regions.environment import global_hooks
from memscale.regions.kinds import Sort, is_followed, is_of_threads, sort_of
from memscale.regions.places import CONTAINERS, INTERNAL, Attributes, Content, Fields, Names, Place, holds, read, write
from memscale.regions.randomness import HostGenerator, is_host_generator
from memscale.regions.views import lasting

# Larger containers are data (a vocabulary, a dataset), not state; copying one at every call would be felt.
LARGEST_CONTAINER = 1024
# Of captured objects, with the lists and the like that they hold: each costs about a microsecond in every call.
MOST_FOLLOWED = 64
_LARGEST_FOLLOWED = 256  # containers among these
# Types of a module's attributes that may lead to state; numbers, strings and sizes are remembered by themselves.
_METHODS = (types.MethodType, types.BuiltinMethodType)  # of a generator, say, or of a list
_OF_TORCH = (torch.Generator, torch.optim.Optimizer)
_STATEFUL = (*CONTAINERS, tuple, types.FunctionType, *_METHODS, functools.partial, *_OF_TORCH)
TABLES = ("_parameters", "_buffers", "_modules")  # of a module: what it registers
_PLAIN = {int, float, bool, str, type(None)}  # a convolution has five tuples of these
_FIXED = {"_reversed_padding_repeated_twice"}  # and a list, which PyTorch writes once
_CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS = (*_CALLED, *(name for name in nn.Module().__dict__ if name.startswith("_forward_") and name not in _CALLED))
NOWHERE: dict[str, Any] = {}  # as the home of a visit: follow no function into its globals


@by_class
def _is_stateful(kind: Any) -> bool:
    return issubclass(kind, _STATEFUL) or is_host_generator(kind) or is_followed(kind)


@by_class
def _leads_on(kind: Any) -> bool:
    return kind is torch.Generator or is_host_generator(kind) or is_followed(kind)


def is_hooked(own: dict[str, Any]) -> bool:
    """Whether the module with the dictionary `own` has hooks that run when it is called."""
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def put_back(scope: Scope) -> None:
    """Make every place of `scope` hold what it held when the scope was read."""
    for place, content in zip(scope.places, scope.contents, strict=True):
        if not holds(place, content):
            write(place, content)


@contextmanager
def as_it_was(scope: Scope) -> Iterator[None]:
    """Run the body with every place of `scope` holding what it held when the scope was read."""
    before: list[tuple[Place, Content]] = []
    try:
        for place, content in zip(scope.places, scope.contents, strict=True):
            if not holds(place, content):
                before.append((place, read(place)))
                write(place, content)
        yield
    finally:
        for place, content in reversed(before):
            write(place, content)


class Scope:
    """The modules and places that a function depends on, with what they hold at this moment.

    Args:
        fn: the function.
        reruns: whether it is to be run again, or only looked at.
        follows: whether plain objects that it captures are followed, and tuples of tensors recorded.

    Raises:
        TransformError: it is to be run again, and has state that cannot be put back.

    Attributes:
        modules: every module reached, once each.
        places: where dependencies are stored.
        contents: what each place holds now, by position.
        tensors: every tensor among the contents, as (position of its place, key in it, tensor).
        generators: the `torch.Generator` s of the user's own.
        optimizers: those of PyTorch, whose states are not followed.
        shared: whether there are places that are not a module's own, such as closures, globals, lists.
        followed: the positions of places that objects led to, which do not count as shared.
        hooks: of modules that have some, all their dictionaries of hooks, by the id of the module's own dictionary.
        registered: by position, the module and the name of a table that was empty at this moment.
    """

    __slots__ = (
        "_follows",
        "_met",
        "_reruns",
        "_seen",
        "contents",
        "followed",
        "generators",
        "hooks",
        "modules",
        "optimizers",
        "places",
        "registered",
        "shared",
        "tensors",
    )

    def __init__(self, fn: Callable[..., Any], *, reruns: bool = True, follows: bool = False) -> None:
        self._reruns = reruns
        self._follows = follows
        self._met: list[Any] = []
        self.followed: list[int] = []
        self.modules: list[nn.Module] = []
        self.places: list[Place] = []
        self.contents: list[Content] = []
        self.tensors: list[tuple[int, Any, torch.Tensor]] = []
        self.generators: list[torch.Generator | HostGenerator] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.shared = False
        self.hooks: dict[int, dict[str, dict[Any, Any]]] = {}
        self.registered: dict[int, tuple[nn.Module, str]] = {}
        self._seen: set[int] = set()
        self._visit(fn, None)
        for table in global_hooks():
            for hook in table.values():
                self._visit(hook, NOWHERE)
        self._follow()

    def describe(self, position: int, key: Any) -> str:
        """What an error calls the tensor with that key in that place."""
        place = self.places[position]
        for root in self.modules:
            for path, module in root.named_modules():
                full = f"{path}.{key}" if path else str(key)
                if place is module._parameters:
                    return f"parameter '{full}' of {type(root).__name__}"
                if place is module._buffers:
                    return f"buffer '{full}' of {type(root).__name__}"
                if getattr(place, "mapping", None) is module.__dict__:
                    return f"attribute '{full}' of {type(root).__name__}"
        return f"captured tensor '{key}'" if isinstance(key, str) else "a captured tensor"

    def exchanged(self, other: Mapping[int, torch.Tensor]) -> Scope:
        """This, holding another tensor in place of each that `other` has, by the identity of the one before."""
        found = copy.copy(self)
        found.contents = [copy.copy(content) for content in self.contents]
        found.tensors = [(position, key, other.get(id(tensor), tensor)) for position, key, tensor in self.tensors]
        for position, key, tensor in found.tensors:
            found.contents[position][key] = tensor
        return found

    def is_as_it_was(self, position: int) -> bool:
        """Whether the place at `position` holds what it held when the scope was read."""
        return holds(self.places[position], self.contents[position])

    def covers(self, thing: Any) -> bool:
        """Whether `thing` is a module, function or container that was reached."""
        return id(thing) in self._seen

    def covers_none(self, ids: Iterable[int]) -> bool:
        """Whether no thing with one of these ids is a module, function or container that was reached."""
        return self._seen.isdisjoint(ids)

    def include(self, thing: Any) -> None:
        """Add what `thing`, a module or function among the arguments, depends on."""
        self._visit(thing, NOWHERE)
        self._follow()

    def find_registered(self) -> None:
        """After a run: add the tables that it made the first entry of, as a module does that makes itself on use."""
        known = set(map(id, self.places))
        for module in self.modules:
            for name in TABLES:
                table = lasting(module.__dict__[name])
                if table and id(table) not in known:
                    self.registered[len(self.places)] = (module, name)
                    self.places.append(table)
                    self.contents.append({})

    def flags(self) -> tuple[bool, ...]:
        """Which of the modules are in training mode."""
        return tuple([module.training for module in self.modules])

    def _add(self, place: Place) -> Content:
        """Record a place; its tensors are recorded too."""
        content = read(place)
        position = len(self.places)
        self.places.append(place)
        self.contents.append(content)
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        self.tensors += [(position, key, value) for key, value in entries if isinstance(value, torch.Tensor)]
        return content

    def _visit(self, thing: Any, home: dict[str, Any] | None) -> None:
        """Add what `thing` holds; `home` is the globals whose functions are followed, `None` at the top."""
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
            self._visit_module(thing)
        elif issubclass(kind, torch.optim.Optimizer):  # not `_seen`: its states are not covered
            self.optimizers.append(thing)
        elif issubclass(kind, Assembled):
            for part in thing.parts():
                self._visit(part, home)
        elif kind is types.FunctionType:
            self._seen.add(id(thing))
            if home is None or thing.__globals__ is home or thing.__closure__:
                self._visit_function(thing)
        elif kind in _METHODS:
            self._visit_method(thing.__self__, getattr(thing, "__func__", None), home)
        elif kind is functools.partial:
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._visit(part, home)
        elif issubclass(kind, CONTAINERS):
            self._visit_container(thing, home)
        elif issubclass(kind, tuple):
            if self._follows and any(isinstance(part, torch.Tensor) for part in thing):
                self._seen.add(id(thing))
                self._add(thing)
            for part in thing:
                self._visit(part, home)
        elif home is None and isinstance(call := inspect.getattr_static(kind, "__call__", None), types.FunctionType):
            self._visit_method(thing, call, home)
        elif self._follows and is_followed(kind):
            self._met.append(thing)

    def _follow(self) -> None:
        """Add the objects that were met and what they lead to, the nearest first, but no modules and no functions."""
        met, self._met = self._met, []
        for thing in met:  # which grows
            if id(thing) in self._seen or len(self.followed) >= MOST_FOLLOWED:
                continue
            kind: Any = type(thing)
            if kind is torch.Generator or is_host_generator(kind):
                self._visit(thing, NOWHERE)
                continue
            self._seen.add(id(thing))
            places: list[Place] = [Fields(thing)] if sort_of(kind) is Sort.OBJECT else []
            if issubclass(kind, (*CONTAINERS, tuple)) and len(thing) <= _LARGEST_FOLLOWED:
                places.append(thing)
            for place in places:
                content = read(place)
                values = content.values() if isinstance(content, dict) else content
                kinds = set(map(type, values)) - _PLAIN
                if any(map(is_of_threads, kinds)):  # others work with it, and must not see the past
                    break
                self.followed.append(position := len(self.places))
                self.places.append(place)
                self.contents.append(content)
                for key, value in content.items() if isinstance(content, dict) else enumerate(content):
                    if (kind := type(value)) not in kinds:
                        continue
                    if isinstance(value, torch.Tensor):
                        self.tensors.append((position, key, value))
                    elif _leads_on(kind):
                        met.append(value)

    def _visit_module(self, root: nn.Module) -> None:
        stack, places, tensors = [root], self.places, self.tensors
        while stack:
            module = stack.pop()
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):
                if self._reruns:
                    raise TransformError(
                        f"the region has a module of TorchScript, {module.original_name}, whose state lives in C++, "
                        "where a rerun cannot put it back; transform the regions around it, or use the module that "
                        "was scripted"
                    )
                self._add({**dict(module.named_parameters()), **dict(module.named_buffers())})
                continue
            own = module.__dict__
            self.modules.append(module)
            content = {key: value for key, value in own.items() if key not in INTERNAL}
            position = len(places)
            places.append(Attributes(own, len(own) - len(content)))
            self.contents.append(content)
            for key, value in content.items():
                kind: Any = type(value)
                if kind in _PLAIN:
                    continue
                if isinstance(value, torch.Tensor):
                    tensors.append((position, key, value))
                elif kind is tuple:
                    if not _PLAIN.issuperset(map(type, value)):
                        self._visit(value, NOWHERE)
                elif _is_stateful(kind) and key not in _FIXED:
                    self._visit(value, NOWHERE)
            for mapping, names in code_places(type(module)):
                self._visit_names(mapping, names, NOWHERE)
            if closes_over(type(module)):
                self._visit_cells(type(module).forward)
            for table in (own["_parameters"], own["_buffers"]):
                if table:
                    position = len(places)
                    places.append(lasting(table))
                    self.contents.append(content := dict(table))
                    tensors += [(position, key, value) for key, value in content.items() if value is not None]
            if is_hooked(own):
                self._visit_forward_hooks(own)
            if children := own["_modules"]:
                places.append(lasting(children))
                self.contents.append(content := dict(children))
                stack.extend([child for child in content.values() if child is not None])

    def _visit_forward_hooks(self, own: dict[str, Any]) -> None:
        self.hooks[id(own)] = {table: own[table].copy() for table in HOOKS if table in own}
        for hook in (*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()):
            # Those of torch (FSDP) have state that goes on from the forward to the recompute.
            if not str(getattr(hook, "__module__", "torch.")).startswith("torch."):
                self._visit(hook, NOWHERE)

    def _visit_function(self, fn: types.FunctionType) -> None:
        home = fn.__globals__
        self._visit_names(home, global_names(fn.__code__), home)
        self._visit_cells(fn, home)
        for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._visit(default, home)

    def _visit_cells(self, fn: Any, home: dict[str, Any] = NOWHERE) -> None:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        cells.pop("__class__", None)  # of `super()`
        self.shared |= bool(cells)
        for cell in cells.values():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                for value in self._add(cell):
                    self._visit(value, home)

    def _visit_method(self, owner: Any, function: Any, home: dict[str, Any] | None) -> None:
        kind: Any = type(owner)
        if isinstance(owner, nn.Module):
            self._visit_module(owner)
            return
        if issubclass(kind, _STATEFUL) or is_host_generator(kind):
            self._visit(owner, home)
        if isinstance(function, types.FunctionType):
            if hasattr(owner, "__dict__") and not isinstance(owner, type):
                self._visit_names(owner.__dict__, code_names(function.__code__), function.__globals__)
            if self._follows and is_followed(kind):
                self._met.append(owner)
            self._visit(function, home)

    def _visit_names(self, mapping: dict[str, Any], names: tuple[str, ...], home: dict[str, Any]) -> None:
        """Add the entries of `mapping` that code names, except modules and classes of Python."""
        kept = [name for name in names if name in mapping and not isinstance(mapping[name], (types.ModuleType, type))]
        if kept:
            self.shared = True
            self._add(Names(mapping, tuple(kept)))
        for name in kept:
            self._visit(mapping[name], home)

    def _visit_container(self, container: Any, home: dict[str, Any] | None) -> None:
        if id(container) in self._seen or len(container) > LARGEST_CONTAINER:
            return
        self._seen.add(id(container))
        self.shared = True
        content = self._add(container)
        for value in content.values() if isinstance(content, dict) else content:
            self._visit(value, home)
        if (attributes := getattr(container, "__dict__", None)) is not None:  # of an instance of a subclass
            self._visit_container(attributes, home)
