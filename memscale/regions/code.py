"""Reads from a function's code, without running it, the globals and closure variables that it names."""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from memscale.regions.class_cache import cached_by_class
from memscale.regions.kinds import CONSTANT
from memscale.regions.state_slots import CONTAINERS


class Reached(NamedTuple):
    """The state that the code of a module class names outside the module. Only entries of its file refer to the class.

    Attributes:
        globals: the `__dict__` of each file, with the names in it that hold data.
        functions: the functions of these files that are called.
        closing: the methods that bind state, each as (index of its class in `__mro__`, name).
        shared: the lists, dictionaries and sets that are attributes of a class, likewise.
    """

    globals: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
    functions: tuple[types.FunctionType, ...]
    closing: tuple[tuple[int, str], ...]
    shared: tuple[tuple[int, str], ...]


@cached_by_class
def code_reached(cls: Any) -> Reached:
    """Collects the names in the forward of a module class, in methods that it calls and in functions of its file."""
    found: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    functions: list[types.FunctionType] = []
    used: dict[str, None] = {"forward": None}
    seen: set[int] = set()
    holders = {id(base): base for base in cls.__mro__ if not _is_of_torch(base)}
    pending: list[Any] = [cls.forward]
    while pending:
        while pending:
            function = function_of(pending.pop())
            if function is None or id(function) in seen or _is_of_torch(function):
                continue
            seen.add(id(function))
            home = function.__globals__
            names = [name for name in global_names(function.__code__) if name in home or not hasattr(builtins, name)]
            data = tuple(name for name in names if name not in home or type(home[name]) not in _CODE)
            found.append((home, data))
            used.update(dict.fromkeys(code_names(function.__code__)))
            of_file = [home[name] for name in names if getattr(home.get(name), "__globals__", None) is home]
            functions += [each for each in of_file if isinstance(each, types.FunctionType)]
            pending += [*of_file, *closed_over(function), function.__dict__.get("__wrapped__")]
            classes = [home[name] for name in names if isinstance(home.get(name), type)]
            holders.update((id(each), each) for each in classes if each.__module__ == home.get("__name__"))
        called = [function_of(vars(holder).get(name)) for holder in holders.values() for name in used]
        pending += [each for each in called if each is not None and id(each) not in seen and not _is_of_torch(each)]
    named = [(at, name) for at, base in enumerate(cls.__mro__) if id(base) in holders for name in used]
    methods = {(at, name): function_of(vars(cls.__mro__[at]).get(name)) for at, name in named}
    closing = [way for way, each in methods.items() if each and _binds_state(each)]
    shared = [(at, name) for at, name in named if isinstance(vars(cls.__mro__[at]).get(name), CONTAINERS)]
    return Reached(tuple(each for each in found if each[1]), tuple(functions), tuple(closing), tuple(shared))


def function_of(thing: Any) -> types.FunctionType | None:
    """Returns the Python function behind `thing`, an entry of a class or of a file, with its wrappers removed."""
    while isinstance(thing, _WRAPPERS):
        thing = next(
            getattr(thing, name) for name in ("fget", "__func__", "func", "__wrapped__") if hasattr(thing, name)
        )
    return thing if isinstance(thing, types.FunctionType) else None


_CACHED = type(functools.lru_cache(lambda: None))
_WRAPPERS: Any = (property, staticmethod, classmethod, types.MethodType, functools.partial, _CACHED)


def _binds_state(function: types.FunctionType) -> bool:
    """Whether `function` has a closure, or a default such as ``cache={}`` that calls can change."""
    closure = set(function.__code__.co_freevars) - {"__class__"}
    return bool(closure) or not CONSTANT.issuperset(map(type, defaults_of(function)))


def defaults_of(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns the default values of the arguments of `function`."""
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def closed_over(function: types.FunctionType) -> list[Any]:
    """Returns the values of the closure variables of `function`."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a cell without a value
            continue
    return found


def _is_of_torch(thing: Any) -> bool:
    return f"{thing.__module__}.".startswith("torch.")


_CODE = {types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, type(nn.Module), str}


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals in `code` and in code nested in it, those that it only assigns included.

    >>> global_names((lambda x: math.pi * x.real).__code__)
    ('math',)
    """
    return _names_of(code, global_names, _OF_GLOBALS)


@functools.lru_cache(maxsize=4096)
def assigned_globals(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals that `code`, or code nested in it, assigns."""
    return _names_of(code, assigned_globals, _ASSIGNS)


def _names_of(
    code: types.CodeType, nested: Callable[[types.CodeType], tuple[str, ...]], operations: Collection[int]
) -> tuple[str, ...]:
    """Returns the names in the instructions of `code` among `operations`, and `nested` of the code nested in it."""
    names: dict[str, None] = {}
    extension = 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= extension
        extension = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in operations:
            names[code.co_names[argument >> 1 if operation in _SHIFTED else argument]] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(nested(constant)))
    return tuple(names)


def _numbers(*operations: str) -> frozenset[int]:
    return frozenset(dis.opmap[each] for each in operations if each in dis.opmap)


# `dis.get_instructions` takes a second for the code of a model of transformers, mostly for line numbers.
_ASSIGNS = _numbers("STORE_GLOBAL")
_OF_GLOBALS = _ASSIGNS | _numbers(
    "LOAD_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_NAME", "STORE_NAME"
)
_SHIFTED = _numbers("LOAD_GLOBAL") if sys.version_info >= (3, 11) else frozenset()  # by a flag in the lowest bit


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns every name that `code`, and code nested in it, looks up outside its locals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(code_names(constant)))
    return tuple(names)
