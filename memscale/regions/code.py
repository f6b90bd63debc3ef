"""What a function's code names, found without running it: globals, and the variables that a class closes over."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from typing import Any

from torch import nn

from memscale.regions.by_class import by_class


@by_class
def closes_over(cls: Any) -> bool:
    """Whether a module class, made in a function, has a forward that uses that function's variables."""
    return isinstance(cls.forward, types.FunctionType) and bool(set(cls.forward.__code__.co_freevars) - {"__class__"})


@by_class
def code_places(cls: Any) -> tuple[tuple[dict[str, Any], tuple[str, ...]], ...]:
    """The globals that a module class's forward, and the functions of its file that it calls, name as data."""
    if cls.__module__.startswith("torch."):
        return ()
    found: dict[int, tuple[dict[str, Any], tuple[str, ...]]] = {}
    pending: list[Any] = [cls.forward]
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or id(function) in found:
            continue
        home = function.__globals__
        names = [name for name in global_names(function.__code__) if name in home or not hasattr(builtins, name)]
        named = {name: home[name] for name in names if name in home}
        data = tuple(name for name in names if name not in home or type(home[name]) not in _CODE)
        found[id(function)] = (home, data)
        pending += [value for value in named.values() if getattr(value, "__globals__", None) is home]
    return tuple((home, data) for home, data in found.values() if data)


_CODE = {types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, type(nn.Module), str}


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that `code`, and code nested in it, names; an attribute may be called like one that is not meant."""
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname.endswith(_OF_GLOBALS)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)


_OF_GLOBALS = ("_GLOBAL", "_GLOBALS", "_NAME")


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> tuple[str, ...]:
    """Every name that `code`, and code nested in it, looks up outside its locals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(code_names(constant)))
    return tuple(names)
