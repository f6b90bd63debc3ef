"""What the code of a step writes to outside of its objects: followed by the names in it, from file to file."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memscale.regions import code_names

# Not followed: none of these keeps what a step gives it, and most of a process's code is theirs.
_OTHERS = frozenset({"torch", "memscale", "numpy", *sys.stdlib_module_names})
_MOST_FUNCTIONS = 2_000
_CONTAINERS = (dict, list, set, deque)


def reached_from(functions: Iterable[Any]) -> Iterator[tuple[dict[str, Any] | type, str, Any]]:
    """What the code of `functions`, and that of what it names, names: where it is, its name, and itself.

    A name that the code assigns and that is not there yet is None.

    Functions, classes and modules are followed and are none of it; neither are numbers and the like of a file, which
    code that changes them names as ``global``.

    >>> table = {}
    >>> def forward(x):
    ...     return table.setdefault(x, x)
    >>> forward.__module__ = "trainer"  # memscale's own code is not followed
    >>> forward.__globals__["table"] = table
    >>> [name for _, name, _ in reached_from([forward]) if name]
    ['table']
    """
    pending = deque(functions)
    seen: set[int] = set()  # functions and classes, which live as long as what has them
    followed = 0
    while pending and followed < _MOST_FUNCTIONS:
        thing = pending.popleft()
        function = _function_of(thing)
        if function is None:
            pending.extend(_parts(thing))
            continue
        if id(function) in seen or _is_others(function.__module__):
            continue
        seen.add(id(function))
        followed += 1
        names, assigned = code_names(function.__code__), _assigned(function.__code__)
        attributes = {name for name in names if not name.startswith("__")}
        pending.extend(_contents(function))
        yield function.__dict__, "", function.__dict__
        home = function.__globals__
        yield from ((home, name, None) for name in assigned if name not in home)
        holders: list[dict[str, Any] | type] = [home]
        for holder in holders:
            own = holder if isinstance(holder, dict) else vars(holder)
            is_new_class = holder is not home and not isinstance(holder, dict) and id(holder) not in seen
            seen.add(id(holder))
            for name in list(own) if is_new_class else names:
                value = own.get(name)
                if isinstance(value, types.ModuleType):
                    if not _is_others(value.__name__) and not any(vars(value) is each for each in holders):
                        holders.append(vars(value))
                elif isinstance(value, type):
                    if not _is_others(value.__module__) and not any(value is each for each in holders):
                        holders.append(value)
                elif _function_of(value) is not None or isinstance(value, (staticmethod, classmethod, property)):
                    if name in names:
                        pending.append(value)
                elif name in own and (_may_keep(value) or name in (assigned if holder is home else attributes)):
                    yield holder, name, value


def _may_keep(value: Any) -> bool:
    """Whether `value` is a tensor, or can be given one."""
    return isinstance(value, (torch.Tensor, *_CONTAINERS)) or not _is_others(type(value).__module__)


@functools.lru_cache(maxsize=4096)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The globals that `code` may assign, among other names: those of a ``global`` are in no list of its own."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _assigned(constant)
    return frozenset(found)


def _function_of(thing: Any) -> types.FunctionType | None:
    """The function of Python's that is called where `thing` is."""
    for _ in range(8):
        if isinstance(thing, types.FunctionType):
            return thing
        if isinstance(thing, types.MethodType):
            thing = thing.__func__
        elif isinstance(thing, functools.partial):
            thing = thing.func
        elif isinstance(thing, _Cached):
            thing = thing.__wrapped__
        else:
            return None
    return None


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, (staticmethod, classmethod)):
        return [thing.__func__]
    if isinstance(thing, property):
        return [each for each in (thing.fget, thing.fset) if each is not None]
    return []


def _contents(function: types.FunctionType) -> list[Any]:
    """Functions that `function` closes over."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # empty as yet
            continue
    return [each for each in found if _function_of(each) is not None]


def _is_others(module: Any) -> bool:
    return str(module).partition(".")[0] in _OTHERS


_Cached: Any = type(functools.lru_cache(maxsize=1)(lambda: None))
