"""The objects that a training step can reach: modules, tensors, optimizers, schedulers, the user's own objects.

During a simulation the caller's tensors keep their identity, and have contents that the step may change freely.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale.core import ConfigError, in_process_group
from memscale.optimizers import TransformedOptimizer
from memscale.regions import (
    NOWHERE,
    Attributes,
    Captures,
    Names,
    assigned_globals,
    closed_over,
    code_names,
    differing,
    function_of,
    global_names,
    holds,
    read,
)
from memscale.simulation.dispatch.live_storages import is_small
from memscale.simulation.kernels.shapes import is_sparse, strided_parts
from memscale.simulation.process.fake_storages import FakeStorages

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A deeper or larger object is data (a dataset, a tokeniser), which a step reads and leaves unchanged.
_DEEPEST = 6
_MOST_OBJECTS = 20_000
_HOLDS_NOTHING = (torch.Tensor, int, float, str, type(None))
_NOT_STATE = (type, nn.Module, torch.Tensor, torch.Generator, types.ModuleType, types.FunctionType, types.MethodType)


class StepScope(Captures):
    """A `Captures` that also follows plain objects, since a step calls optimizers, schedulers and trainers.

    >>> layer = nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(layer.parameters())
    >>> scope = StepScope(lambda: optimizer.step())
    >>> {id(tensor) for _, _, tensor in scope.tensors} == {id(layer.weight), id(layer.bias)}
    True
    """

    __slots__ = ("_classes", "_depth", "_objects", "optimizers")

    def __init__(self, *roots: Any) -> None:
        self._depth = 0
        self._objects = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self._classes: list[tuple[type, str, Any]] = []
        super().__init__(roots)  # type: ignore[arg-type]  # a tuple of roots is visited part by part
        self._visit_code(roots)

    def put_back_classes(self) -> None:
        """Restores the attributes of the classes that the code names."""
        for cls, name, value in self._classes:
            if vars(cls).get(name) is not value:
                setattr(cls, name, value)

    def _visit_code(self, roots: Any) -> None:
        """Adds the objects that the code of the modules, of their hooks and of the roots names, in any file."""
        called: dict[int, Any] = {id(root): root for root in roots}
        for module in self.modules:
            for cls in type(module).__mro__:
                if not cls.__module__.startswith("torch."):
                    called.update((id(each), each) for each in vars(cls).values() if isinstance(each, FunctionType))
            for name in _HOOKS:
                called.update((id(hook), hook) for hook in (module.__dict__.get(name) or {}).values())
        named: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for holder, name, value in reached_from(called.values()):
            if isinstance(holder, dict) and holder is not value:
                named.setdefault(id(holder), (holder, []))[1].append(name)
            elif isinstance(holder, type):
                self._classes.append((holder, name, value))
            self._visit(value, NOWHERE)
        for mapping, names in named.values():
            self._add(Names(mapping, tuple(dict.fromkeys(names))))

    def _visit(self, thing: Any, home: dict[str, Any] | None) -> None:
        if self._depth > _DEEPEST:
            return
        self._depth += 1
        try:
            super()._visit(thing, home)
            if id(thing) in self._seen:
                return
            if isinstance(thing, tuple) and any(isinstance(part, torch.Tensor) for part in thing):
                self._add(thing)  # a batch keeps its objects, and its tensors may be on meta
            if isinstance(thing, (dict, list, set, deque)):  # including subclasses: a defaultdict, an OrderedDict
                self._visit_container(thing, home)
            elif isinstance(getattr(thing, "__dict__", None), dict):
                self._visit_object(thing)
        finally:
            self._depth -= 1

    def _visit_module(self, root: nn.Module) -> None:
        known = len(self.modules)
        super()._visit_module(root)
        for module in self.modules[known:]:
            # A region's forward stores the effects of earlier calls; hooks may hold optimizers and lists.
            self._visit(module.__dict__.get("forward"), None)
            for name in _HOOKS:
                self._visit_hooks(module.__dict__.get(name))
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._visit_hooks(parameter._backward_hooks)
                    self._visit_hooks(parameter._post_accumulate_grad_hooks)

    def replaced(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the `tensors` that the step replaced as plain attributes of modules, and that have no other holder.

        Example: a weight made by a hook of `torch.nn.utils.weight_norm`. The first step of a real loop frees the weight
        from before the step. A tensor that a container made by the step may hold is left out.
        """
        former: list[torch.Tensor] = []
        for place, content in zip(self.slots, self.contents, strict=True):
            if isinstance(place, Attributes) and isinstance(content, dict) and not holds(place, content):
                now = read(place)
                assert isinstance(now, dict), "attributes have names"
                changed = differing(content, now)
                if not all(isinstance(now.get(name), _HOLDS_NOTHING) for name in changed):
                    return []
                former += [value for name in changed if isinstance(value := content.get(name), torch.Tensor)]
        if not former:
            return []
        held: set[int] = set()
        for place in self.slots:
            content = read(place)
            values = content.values() if isinstance(content, dict) else content
            held.update(value.untyped_storage()._cdata for value in values if _has_storage(value))
        known = {tensor.untyped_storage()._cdata for tensor in tensors if _has_storage(tensor)}
        return [tensor for tensor in former if _has_storage(tensor) and tensor.untyped_storage()._cdata in known - held]

    def _visit_hooks(self, hooks: dict[int, Any] | None) -> None:
        if hooks is not None:  # also an empty table: a forward may register the first hook
            self._add(hooks)
            for hook in list(hooks.values()):
                self._visit(hook, None)

    def _visit_object(self, thing: Any) -> None:
        if isinstance(thing, _NOT_STATE) or self._objects >= _MOST_OBJECTS:
            return
        self._seen.add(id(thing))
        self._objects += 1
        for value in self._add(Attributes(thing.__dict__, 0)).values():  # type: ignore[union-attr]
            if not isinstance(thing, torch.optim.Optimizer):
                self._visit(value, NOWHERE)
        if isinstance(thing, torch.optim.Optimizer):
            self._visit_optimizer(thing)

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)
        self._add(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._add(group)
            self._add(group["params"])
        if isinstance(optimizer, TransformedOptimizer):
            self._visit(optimizer.parts, NOWHERE)  # parts store which parameters have stepped, and the tiers of states
        self._add(optimizer.state)
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self._add(state)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) and not value.is_meta


# The search stops at these packages: they hold most of a process's code, and no object of a step.
_OTHERS = frozenset({"torch", "memscale", "numpy", *sys.stdlib_module_names})
_MOST_FUNCTIONS = 2_000
_CONTAINERS = (dict, list, set, deque)


def reached_from(functions: Iterable[Any]) -> Iterator[tuple[dict[str, Any] | type, str, Any]]:
    """Yields (holder, name, object) for each object that the code of `functions` names, directly or by other functions.

    The object is None for a name that the code assigns and that does not exist yet. The search goes through functions,
    classes and modules without yielding them. Numbers and other immutable globals are yielded only if the code declares
    them ``global``.

    >>> table = {}
    >>> def forward(x):
    ...     return table.setdefault(x, x)
    >>> forward.__module__ = "trainer"  # memscale's own code is not followed
    >>> forward.__globals__["table"] = table
    >>> [name for _, name, _ in reached_from([forward]) if name]
    ['table']
    """
    pending = deque(functions)
    seen: set[int] = set()  # the ids of functions and classes, which stay alive through their holders
    followed = 0
    while pending and followed < _MOST_FUNCTIONS:
        thing = pending.popleft()
        if isinstance(thing, property):
            pending.append(thing.fset)
        function = function_of(thing)
        if function is None or id(function) in seen or _is_others(function.__module__):
            continue
        seen.add(id(function))
        followed += 1
        names, assigned = code_names(function.__code__), assigned_globals(function.__code__)
        # An attribute `self.head` does not read a global `head` of the user, which can be another model.
        of_globals = global_names(function.__code__)
        attributes = {name for name in names if not name.startswith("__")}
        pending += closed_over(function)
        yield function.__dict__, "", function.__dict__
        home = function.__globals__
        yield from ((home, name, None) for name in assigned if name not in home)
        holders: list[dict[str, Any] | type] = [home]
        for holder in holders:
            own = holder if isinstance(holder, dict) else vars(holder)
            is_new_class = holder is not home and not isinstance(holder, dict) and id(holder) not in seen
            seen.add(id(holder))
            named = [name for name in names if holder is not home or name in of_globals]
            for name in list(own) if is_new_class else named:
                value = own.get(name)
                if isinstance(value, types.ModuleType):
                    if not _is_others(value.__name__) and not any(vars(value) is each for each in holders):
                        holders.append(vars(value))
                elif isinstance(value, type):
                    if not _is_others(value.__module__) and not any(value is each for each in holders):
                        holders.append(value)
                elif isinstance(value, property) or function_of(value) is not None:
                    if name in names:
                        pending.append(value)
                elif name in own and (_may_keep(value) or name in (assigned if holder is home else attributes)):
                    yield holder, name, value


def _may_keep(value: Any) -> bool:
    """Whether `value` is a tensor, or can hold one."""
    return isinstance(value, (torch.Tensor, *_CONTAINERS)) or not _is_others(type(value).__module__)


def _is_others(module: Any) -> bool:
    return str(module).partition(".")[0] in _OTHERS


@contextmanager
def contents_kept(tensors: list[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Restores the storage and shape of each tensor afterwards: a step may assign ``.data``, or resize a tensor.

    Yields the tensors, each with an alias of its contents.
    """
    before = [(tensor, tensor.detach()) for tensor in tensors]
    try:
        yield before
    finally:
        for tensor, alias in before:
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape or tensor.dtype != alias.dtype:
                tensor.data = alias


@contextmanager
def on_cpu(
    leaves: list[torch.Tensor], tensors: list[torch.Tensor], inputs: list[torch.Tensor], fakes: FakeStorages
) -> Iterator[frozenset[int]]:
    """Gives every tensor outside the CPU fake contents on the CPU; the tensor objects keep their identity.

    Args:
        leaves: the tensors of the step.
        tensors: the tensors with storages among them, and inside of wrapper subclasses among them.
        inputs: the tensors that get contents even if they are on meta next to real parameters.
        fakes: makes the contents.

    Yields:
        The addresses of the fake storages.
    """
    # In a process group, parameters on the CPU are swapped too: DDP's C++ reducer would communicate their gradients.
    distributed = in_process_group()
    storages: dict[int, torch.UntypedStorage] = {}
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = any(tensor.requires_grad and not tensor.is_meta for tensor in tensors)
    given = {id(tensor) for tensor in inputs}
    try:
        for tensor in tensors:
            if tensor.is_meta and real and id(tensor) not in given:
                continue  # next to real parameters, a meta tensor is the caller's skeleton: leave it
            if tensor.device.type == "cpu":
                if distributed and tensor.requires_grad and tensor.is_leaf:
                    _swap(tensor, tensor.detach(), swapped)
                continue
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                raise ConfigError(
                    f"a {type(tensor).__name__} on {tensor.device} cannot be simulated; move the model to the CPU first"
                )
            own = tensor.untyped_storage()
            if own._cdata not in storages:
                # A tensor whose values may be computed needs its own memory; all fake storages share one range.
                is_fake = tensor.requires_grad or not is_small(tensor)
                storages[own._cdata] = fakes.storage(own.nbytes()) if is_fake else _zeros(own.nbytes())
            stand_in = fakes.like(tensor, storages[own._cdata])
            if not tensor.is_floating_point() and tensor.device.type != "meta" and tensor.numel() <= 1 << 20:
                stand_in = tensor.detach().cpu()  # the model may decide by these values
            given.add(stand_in.untyped_storage()._cdata)
            _swap(tensor, stand_in, swapped)
        for tensor in leaves:  # a wrapper subclass is made anew, to report the device of its inner tensors
            if is_traceable_wrapper_subclass(tensor) and tensor.device.type != "cpu":
                inner, (_, context) = wrapped(tensor), tensor.__tensor_flatten__()
                if all(part.device.type == "cpu" for part in with_storages([tensor])):
                    stand_in = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
                    _swap(tensor, stand_in.detach(), swapped)
        yield frozenset(given)
    finally:
        for tensor, stand_in in reversed(swapped):
            torch._C._swap_tensor_impl(tensor, stand_in)


def _swap(tensor: torch.Tensor, stand_in: torch.Tensor, swapped: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Swaps the implementations of `tensor` and `stand_in`, keeping the Python hooks on the gradient."""
    stand_in.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, stand_in)
    swapped.append((tensor, stand_in))
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def _zeros(nbytes: int) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()


def with_storages(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that have storages; a wrapper subclass is replaced by its inner tensors."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            found += with_storages([part for part in wrapped(tensor).values() if isinstance(part, torch.Tensor)])
        elif is_sparse(tensor):
            found += with_storages(strided_parts([tensor]))
        elif tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0:
            found.append(tensor)
    return found


def wrapped(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the parts of a wrapper subclass, by name: its inner tensors, and the mesh of a DTensor."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
