"""Modules as functions of their state, and the structural copy that `transform` works on."""

from __future__ import annotations

import functools
import inspect
import operator
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memscale.core import Assembled, TransformError, internals


def functional(module: nn.Module) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """Returns a pure function that computes `module`, and the state that the function takes first.

    ``fn(state, *args, **kwargs)`` returns the result of ``module(*args, **kwargs)`` with the tensors of `state`:

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
            f"functional(module) takes a torch.nn.Module, got {type(module).__name__}; call a plain function directly"
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
    """Returns the entries (dictionary, name, tensor) of modules with several paths, for the caller to restore.

    For such a module `functional_call` (PyTorch 2.10 to 2.14) swaps `state` in once per path and restores in the same
    order. The second swap saves the tensor from `state` as the original, so the model would keep that tensor.
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


Modules = list[tuple[str, nn.Module]]
"""Pairs (path, module) of a tree; a module with several paths occurs once for each."""


def walk(root: nn.Module) -> Modules:
    """Returns ``list(root.named_modules(remove_duplicate=False))``, in a fifth of the time."""
    found: Modules = []
    _walk("", root, found)
    return found


def _walk(path: str, module: nn.Module, found: Modules) -> None:
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None:
            _walk(f"{path}.{name}" if path else name, child, found)


def copy_tree(modules: Modules) -> dict[int, Any]:
    """Copies a module tree without its parameters and buffers. Returns a map from the id of each module to its copy.

    Every module is a new object of the same class. References from one module of the tree to another (children,
    attributes, lists, bound methods, closures, weak references, hooks) point to the copies; everything else is shared.
    Containers among the attributes are copied, so that a list that `forward` appends to belongs to one tree only. An
    object held by a hook, a partial or a closure stays the same object, unless it is such a container or refers to
    modules of the tree.
    """
    memo: dict[int, Any] = {}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _, module in modules:
        if id(module) in memo:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            memo[id(module)] = module  # shared, since it lives in C++; it cannot be a region either
            continue
        # Not by the class's own `__new__`, which may take arguments; that of a `GraphModule` makes another class.
        copy = memo[id(module)] = object.__new__(module.__class__)
        pairs.append((module.__dict__, copy.__dict__))
    others: list[_Entry] = []
    for source, target in pairs:
        for key, value in source.items():
            if key in _TABLES:
                # The copy owns this dictionary: functional_call swaps entries in place, and a shared one would swap
                # the caller's model too. The parameters in it are the same objects.
                if not value:
                    target[key] = type(value)()
                    continue
                if key == "_parameters":
                    target[key] = value.copy()
                    continue
            elif type(value) in _PLAIN or key in _SHARED:
                target[key] = value
                continue
            _copy_entry(target, key, value, memo, others)
    # Last, since hooks and partials may refer to containers of the tree, which all have a copy by now.
    for holder, key, value in others:
        holder[key] = remapped(value, memo, copies=True)
    return memo


_PLAIN = frozenset({bool, int, float, str, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.device})
# Shared between the trees, since `.to()` and plain assignment replace buffers in the dictionary.
_SHARED = frozenset({"_buffers", "_non_persistent_buffers_set"})
_TABLES = frozenset(nn.Module().__dict__) - {"training", "_is_full_backward_hook"} - _SHARED
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_Entry = tuple[Any, Any, Any]  # a container, a key or an index in it, and the new value there


def _copy_entry(holder: Any, key: Any, value: Any, memo: dict[int, Any], others: list[_Entry]) -> None:
    """Puts the copy of `value`, a module or container, into `holder`; other values are appended to `others`."""
    kind: Any = type(value)
    if kind in _PLAIN or (known := memo.get(id(value))) is not None:
        holder[key] = value if kind in _PLAIN else known
    elif kind in _MAPPINGS:
        other = holder[key] = memo[id(value)] = value.copy()  # with its factory of defaults
        for name, item in value.items():
            _copy_entry(other, name, item, memo, others)
    elif kind is list or kind is deque:
        other = holder[key] = memo[id(value)] = value.copy()
        for index, item in enumerate(value):
            _copy_entry(other, index, item, memo, others)
    else:
        others.append((holder, key, value))


def _compiled(fn: types.FunctionType, method: types.MethodType) -> Callable[..., Any]:
    """Compiles `method`, of a copied module, with the settings of `fn`, the compiled method of the original."""
    settings = inspect.getclosurevars(fn).nonlocals.get("self")
    if settings is None:
        raise TransformError(
            f"a module inside has a custom compiled function ({fn.__qualname__}), which would still run the original "
            "module in the result of transform(); transform the model first, then compile the result"
        )
    compiled: Callable[..., Any] = settings(method)
    return compiled


def _refers(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Whether a function, or a value in one of its cells, is or refers to something that has a copy."""
    if id(value) in memo:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if type(value) is types.FunctionType:
        return any(_refers(content, memo, seen) for _, content in _cells_with_content(value))
    if type(value) is types.MethodType:
        return id(value.__self__) in memo
    if type(value) is functools.partial:
        return any(_refers(part, memo, seen) for part in (value.func, *value.args, *value.keywords.values()))
    return False


def _cells_with_content(fn: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    for cell in fn.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:  # an empty cell, of a local variable before its assignment
            continue


def _with_cells_of_copies(fn: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Returns a copy of `fn` whose closure refers to the copies, such as a hook that writes to ``self``.

    Cells with other contents stay those of `fn`: a list that the user collects features in is one list.
    """
    changed = [(cell, content) for cell, content in _cells_with_content(fn) if _refers(content, memo, set())]
    cells = {id(cell): memo.setdefault(id(cell), types.CellType()) for cell, _ in changed}
    closure = tuple([cells.get(id(cell), cell) for cell in fn.__closure__ or ()])
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    memo[id(fn)] = copy  # before the cells are filled, since a function may refer to itself
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(copy, name, getattr(fn, name))
    vars(copy).update(vars(fn))
    for cell, content in changed:
        cells[id(cell)].cell_contents = remapped(content, memo)
    return copy


def remapped(value: Any, memo: dict[int, Any], *, copies: bool = False) -> Any:
    """Replaces every reference to a module of the tree in `value` by its copy. Returns `value` itself without any.

    Args:
        value: an attribute of a module.
        memo: maps the id of a module or container to its copy.
        copies: whether to copy sets, and containers in tuples, even without references to modules.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind is types.MethodType and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if kind is types.FunctionType and (inner := vars(value).get("_torchdynamo_orig_callable")) is not None:
        return _compiled(value, remapped(inner, memo)) if id(getattr(inner, "__self__", None)) in memo else value
    if kind is weakref.ref and id(value()) in memo:
        return weakref.ref(memo[id(value())], value.__callback__)
    if kind is types.FunctionType and value.__closure__:
        return _with_cells_of_copies(value, memo) if _refers(value, memo, set()) else value
    if kind is functools.partial:
        func, args, keywords = parts = value.func, value.args, value.keywords
        other = remapped(func, memo), *(remapped(part, memo) for part in (args, keywords))
        return value if all(map(operator.is_, other, parts)) else functools.partial(other[0], *other[1], **other[2])
    if kind in _MAPPINGS:
        entries = {key: remapped(item, memo, copies=copies) for key, item in value.items()}
        if not copies and all(entries[key] is item for key, item in value.items()):
            return value
        copy = value.copy()
        dict.update(copy, entries)  # `Counter.update` would add to the counts
        return copy
    if kind in (list, set, deque) or (issubclass(kind, tuple) and (kind is tuple or hasattr(kind, "_make"))):
        items = [remapped(item, memo, copies=copies) for item in value]
        if all(map(operator.is_, items, value)) and (not copies or issubclass(kind, tuple)):
            return value
        if kind is deque:
            return deque(items, value.maxlen)
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    if issubclass(kind, Assembled):
        return value.reassembled(functools.partial(remapped, memo=memo))
    if kind is _WrappedHook:
        return kind(remapped(value.hook, memo), remapped(value.module(), memo) if value.with_module else None)
    return value


_WrappedHook = internals.named("torch.nn.modules.module._WrappedHook")
