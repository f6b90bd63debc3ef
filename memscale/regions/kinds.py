"""How the things among the arguments of a region are remembered, by their class."""

from __future__ import annotations

import array
import enum
import functools
import sys
import types
from collections import deque
from typing import Any

import torch
from torch import nn

from memscale.core import Assembled
from memscale.regions.by_class import by_class
from memscale.regions.randomness import is_host_generator

# These do not change while a region runs, and lead far: a logger to every other one, a mesh to groups of processes.
_LEFT_ALONE = {"concurrent", "logging", "multiprocessing", "numpy", "threading", "torch", "weakref"}
_IMMUTABLE = (bool, int, float, complex, str, bytes, type, types.ModuleType, enum.Enum)


class Sort(enum.Enum):
    """How a thing among the arguments is remembered."""

    VALUE = "by reference: nothing in it can change"
    TUPLE = "by its items"
    CONTAINER = "by its items; made again for a rerun"
    OBJECT = "by its attributes, and its items if it is a container too"
    SCOPE = "as if the region captured it"
    ARRAY = "by a copy: of NumPy or of Python, which count no versions"
    ITERATOR = "not at all: a rerun would go on where the run has stopped"


@by_class
def sort_of(kind: Any) -> Sort:
    """How instances of `kind`, which is no tensor, are remembered."""
    if kind in (list, dict, set):
        return Sort.CONTAINER
    if issubclass(kind, tuple):
        return Sort.VALUE if kind is torch.Size else Sort.TUPLE
    if kind in (types.FunctionType, types.MethodType, functools.partial) or issubclass(kind, Assembled):
        return Sort.SCOPE
    if issubclass(kind, (nn.Module, torch.Generator)) or is_host_generator(kind):
        return Sort.SCOPE
    if kind in (bytearray, array.array) or (kind.__module__ == "numpy" and kind.__name__ == "ndarray"):
        return Sort.ARRAY
    is_left_alone = issubclass(kind, _IMMUTABLE) or kind.__module__.partition(".")[0] in _LEFT_ALONE
    step = getattr(kind, "__next__", None)
    if step is not None and (is_left_alone or type(step) is not types.FunctionType):  # what it is at, no attribute says
        return Sort.ITERATOR
    if not is_left_alone and (kind.__dictoffset__ or slots(kind) or issubclass(kind, (list, dict, set, deque))):
        return Sort.OBJECT
    return Sort.VALUE


def slots(kind: Any) -> list[tuple[str, Any]]:
    """The attributes that Python classes declare in `__slots__`, each with what reads and writes it."""
    return [(name, kind.__mro__[at].__dict__[name]) for at, name in _slots(kind)]


@by_class
def _slots(kind: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (at, name)
        for at, cls in enumerate(kind.__mro__)
        if "__slots__" in cls.__dict__
        for name, member in cls.__dict__.items()
        if type(member) is types.MemberDescriptorType
    )


@by_class
def can_be_made(kind: Any) -> bool:
    """Whether nobody can tell an object of `kind` from another one with the same attributes, once it is gone."""
    return kind.__new__ is object.__new__ and kind.__weakrefoffset__ != 0 and not hasattr(kind, "__del__")


@by_class
def has_dictionary(kind: Any) -> bool:
    """Whether instances of `kind` keep attributes in a dictionary of their own, and do not compute it."""
    own = [cls.__dict__["__dict__"] for cls in kind.__mro__ if "__dict__" in cls.__dict__]
    return bool(own) and {*map(type, own)} <= {types.GetSetDescriptorType, types.MemberDescriptorType}


@by_class
def is_plain(kind: Any) -> bool:
    """Whether an object of `kind` is its attributes, all of them in a dictionary of its own, and can be made again."""
    if sort_of(kind) is not Sort.OBJECT or issubclass(kind, (list, dict, set, deque)):
        return False
    return has_dictionary(kind) and not slots(kind) and can_be_made(kind)


_NAMESPACES = {"argparse", "collections", "types"}
_OURS = __name__.partition(".")[0]  # which remembers what the rerun must not forget
_OF_THREADS = {"_asyncio", "_queue", "_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}


@by_class
def is_followed(kind: Any) -> bool:
    """Whether what an instance of `kind` leads to, that a region captures, is state of the region."""
    if issubclass(kind, torch.Tensor):
        return False
    package = kind.__module__.partition(".")[0]
    if sort_of(kind) is Sort.OBJECT:  # of Python's own, only the plain ones: a queue is filled by others meanwhile
        return package in _NAMESPACES or (package not in sys.stdlib_module_names and package != _OURS)
    return sort_of(kind) in (Sort.CONTAINER, Sort.TUPLE)


@by_class
def is_of_threads(kind: Any) -> bool:
    """Whether who holds an instance of `kind` (a lock, a thread, a queue) expects several threads to work with it."""
    return kind.__module__.partition(".")[0] in _OF_THREADS


_CONSTANT = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout}


def is_constant(kind: Any) -> bool:
    """Whether instances of `kind` can neither change nor lead to anything."""
    return kind in _CONSTANT or issubclass(kind, enum.Enum)
