"""Modules as functions of their state, and the structural copy that `transform` works on."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.core import Assembled, TransformError


def functional(module: nn.Module) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """The module as a pure function, and the state that it is a function of.

    ``fn(state, *args, **kwargs)`` is what ``module(*args, **kwargs)`` would return with those parameters and buffers:

    >>> import torch, memscale as ms
    >>> fn, state = ms.functional(torch.nn.Linear(2, 1))
    >>> sorted(state)
    ['bias', 'weight']
    >>> grads = torch.func.grad(lambda s: fn(s, torch.ones(3, 2)).sum())(state)
    >>> grads["weight"].tolist(), grads["bias"].tolist()
    ([[3.0, 3.0]], [3.0])

    Args:
        module: any module. It is read at call time, so `train()` and `eval()` on it take effect.

    Returns:
        ``(fn, state)``. `state` maps names to the module's own parameters and buffers (tied ones once). In-place
        buffer updates, such as BatchNorm statistics, happen to the buffers in the state that is passed.

    Raises:
        TransformError: `module` is not a module.

    Source: ``torch.func.functional_call``.
    """
    if not isinstance(module, nn.Module):
        raise TransformError(
            f"functional(module) takes a torch.nn.Module, got {type(module).__name__}; "
            "a plain function already is one: use it as it is"
        )
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def fn(state: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, Mapping):
            raise TransformError(
                f"fn(state, *args) takes the state first, a mapping as functional() returned it, got "
                f"{type(state).__name__}; write fn(state, ...)"
            )
        held = _taken_twice(module, state)
        try:
            return torch.func.functional_call(module, state, args, kwargs)
        finally:
            for mapping, name, tensor in held:
                mapping[name] = tensor

    return fn, state


def _taken_twice(module: nn.Module, state: dict[str, torch.Tensor]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """The places that `functional_call` fills for each path of a module that has several, with what they hold.

    It takes `state` in for each path and gives back in the same order, so that the first value it took for its own,
    that of `state`, is the last that it puts there (PyTorch 2.10 to 2.14): the model would keep it for good.
    """
    seen: set[nn.Module] = set()
    shared: list[nn.Module] = []
    for _, each in module.named_modules(remove_duplicate=False):
        if each in seen and each not in shared:
            shared.append(each)
        seen.add(each)
    if not shared:
        return []
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    taken = {id(tensor) for name, tensor in tensors if name in state}
    return [
        (mapping, name, tensor)
        for each in shared
        for mapping in (each._parameters, each._buffers)
        for name, tensor in mapping.items()
        if tensor is not None and id(tensor) in taken
    ]


def copy_tree(root: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """A new module tree over the same parameters and buffers, and the map from each old module's id to its copy.

    Every module is a new object of the same class. References from one module of the tree to another (children,
    attributes, lists, bound methods, hooks) lead to copies; everything else is shared. Containers are copied, so
    that a list that `forward` appends to belongs to one tree only.
    """
    memo: dict[int, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            memo[id(module)] = module  # lives in C++: it is shared, and cannot be a region
            continue
        # A graph module's own `__new__` makes another class, which lacks its forward.
        new = object.__new__ if isinstance(module, torch.fx.GraphModule) else module.__class__.__new__
        memo[id(module)] = new(module.__class__)
    for module in root.modules():
        copy = memo[id(module)]
        if copy is not module:
            _copy_dict(module.__dict__, copy.__dict__, memo)
    return memo[id(root)], memo


def _copy_dict(source: dict[str, Any], target: dict[str, Any], memo: dict[int, nn.Module]) -> None:
    for key, value in source.items():
        if key == "_parameters":
            # The copy owns this dictionary: functional_call swaps entries in place, and a shared one would swap the
            # caller's model too. The parameters in it are the same objects.
            target[key] = value.copy()
        elif key == "_buffers" or key == "_non_persistent_buffers_set":
            # Shared: `.to()` and plain assignment replace buffers in the dictionary, and both trees must see it.
            target[key] = value
        else:
            target[key] = remapped(value, memo)


def _compiled(fn: types.FunctionType, method: types.MethodType) -> Callable[..., Any]:
    """What `torch.compile` makes of `method` with the settings of `fn`, which it made of the original's."""
    settings = inspect.getclosurevars(fn).nonlocals.get("self")
    if settings is None:
        raise TransformError(
            f"a module inside is compiled in a way of its own ({fn.__qualname__}), and would run as the original does "
            "in what transform() returns; transform the model first, and compile what comes of it"
        )
    compiled: Callable[..., Any] = settings(method)
    return compiled


def remapped(value: Any, memo: dict[int, nn.Module]) -> Any:
    """`value` with every reference to a module of the tree replaced by its copy."""
    kind: Any = type(value)
    if kind in (bool, int, float, str, type(None), torch.Tensor):
        return value
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if kind is types.MethodType and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if kind is types.FunctionType and (inner := vars(value).get("_torchdynamo_orig_callable")) is not None:
        return _compiled(value, remapped(inner, memo)) if id(getattr(inner, "__self__", None)) in memo else value
    if kind is functools.partial:
        return functools.partial(
            remapped(value.func, memo),
            *(remapped(arg, memo) for arg in value.args),
            **{key: remapped(arg, memo) for key, arg in value.keywords.items()},
        )
    if kind in (dict, OrderedDict, defaultdict, Counter):
        other = value.copy()  # with its factory of defaults
        dict.update(other, {key: remapped(item, memo) for key, item in value.items()})  # a Counter's own adds
        return other
    if kind in (list, set):
        return kind(remapped(item, memo) for item in value)
    if kind is deque:
        return deque((remapped(item, memo) for item in value), value.maxlen)
    if issubclass(kind, tuple) and (kind is tuple or hasattr(kind, "_make")):
        items = [remapped(item, memo) for item in value]
        return tuple(items) if kind is tuple else kind._make(items)
    if issubclass(kind, Assembled):
        return value.reassembled(functools.partial(remapped, memo=memo))
    return value
