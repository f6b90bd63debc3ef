"""Regions that `torch.compile` cannot recompute: those that change a buffer in place.

A compiled graph ends by writing the new value of a buffer over the old value. Its recompute in backward starts from the
new value, so the gradient is wrong without an error, with `torch.utils.checkpoint` as well. No code of memscale runs in
a compiled region: its effects must be known from an earlier uncompiled run. The code of the modules tells whether such
a run is needed.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from memscale.core import internals, modules_in
from memscale.regions import cached_by_class
from memscale.transforms.checkpoint.learned_effects import LearnedEffects

_WRITES = re.compile(r"[a-zA-Z0-9]_$")  # PyTorch's names of methods that write in place


def may_change(modules: Iterable[nn.Module]) -> bool:
    """Whether a module with buffers, among `modules`, has code that may write in place.

    The search includes modules in lists and dictionaries of `modules`, and global modules that their code names. It
    leaves out normalizations, whose backward does not read the running statistics that their forward updates.
    """
    found = [module for root in modules for module in (root, *_in_containers(root))]
    kinds: set[Any] = {type(module) for module in found}
    return any(map(_has_and_writes, found)) or any(map(_names_one_that_writes, kinds))


def _has_and_writes(module: nn.Module) -> bool:
    kind: Any = type(module)
    return bool(module._buffers) and _class_writes(kind)


def _in_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in lists, tuples and dictionaries among the attributes of `module`, children excluded."""
    for name in module.__dict__.keys() - _REGISTERED:
        value = module.__dict__[name]
        if type(value) in (list, tuple, dict) and value:
            for each in value.values() if type(value) is dict else value:
                if isinstance(each, nn.Module):
                    yield from each.modules()


_REGISTERED = frozenset(nn.Module().__dict__)


@cached_by_class
def _class_writes(kind: Any) -> bool:
    return not issubclass(kind, internals.NormBase) and any(_writes(each.__code__) for each in _functions(kind))


@cached_by_class
def _names_one_that_writes(kind: Any) -> bool:
    if kind.__module__.startswith("torch."):
        return False
    named = [each.__globals__.get(name) for each in _functions(kind) for name in each.__code__.co_names]
    modules = [module for each in named if isinstance(each, nn.Module) for module in each.modules()]
    return any(map(_has_and_writes, modules))


def _functions(kind: type[Any]) -> Iterator[types.FunctionType]:
    """Yields the functions of a module class, and the functions of the same file that their code names."""
    functions = [
        function
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for function in vars(base).values()
        if isinstance(function, types.FunctionType) and function.__name__ != "__init__"
    ]
    seen: set[types.FunctionType] = set()
    while functions:
        if (function := functions.pop()) in seen:
            continue
        seen.add(function)
        yield function
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        functions += [
            each for each in named if isinstance(each, types.FunctionType) and each.__globals__ is function.__globals__
        ]


@functools.lru_cache(maxsize=4096)
def _writes(code: types.CodeType) -> bool:
    if any(_WRITES.search(name) for name in code.co_names):
        return True
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and _writes(constant):
            return True
        if isinstance(constant, tuple) and "out" in constant:  # the names of the arguments of a call
            return True
    return any(
        each.opname == "STORE_SUBSCR" or each.opname.startswith("INPLACE_") or each.argrepr in _ADDS
        for each in dis.get_instructions(code)
    )


_ADDS = {f"{operator}=" for operator in ("+", "-", "*", "/", "//", "%", "@", "**", "&", "|", "^", "<<", ">>")}


def why_not_compiled(parts: list[Any], learned: Sequence[LearnedEffects], looks_like_it: bool) -> str | None:
    """Returns the reason why a region must run uncompiled, now or always; `None` if the region can be compiled.

    Args:
        parts: the functions and modules that the region is made of.
        learned: the effects that earlier uncompiled runs found.
        looks_like_it: the result of `may_change`.
    """
    if any(each.changes for each in learned):
        return (
            "checkpoint() around a region that changes a tensor in place: if the region were compiled, its recompute "
            "would lack the old value"
        )
    if not looks_like_it:
        return None
    training = any(module.training for part in parts for root in modules_in(part) for module in root.modules())
    if any(training not in each.trained_in for each in learned):
        return (
            "checkpoint() around a module with buffers, whose code may write to the buffers in place, needs one "
            "uncompiled run in training mode, and one in eval()"
        )
    return None
