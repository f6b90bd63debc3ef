"""Decides by class how an object among the arguments of a region is recorded for a rerun."""

from __future__ import annotations

import array
import dataclasses
import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from memscale.core import Assembled, TransformError
from memscale.regions.class_cache import cached_by_class
from memscale.regions.randomness import is_host_generator

# Packages whose objects are not followed: a region does not change them, and they refer to very many other objects (a
# logger to every other logger, a device mesh to process groups).
_LEFT_ALONE = {"concurrent", "logging", "multiprocessing", "numpy", "threading", "torch", "weakref"}
_IMMUTABLE = (bool, int, float, complex, str, bytes, type, types.ModuleType, enum.Enum)


class Sort(enum.Enum):
    """How an object among the arguments is recorded."""

    VALUE = "by reference, since it is immutable"
    TUPLE = "by its items"
    CONTAINER = "by its items; a rerun gets a new container"
    OBJECT = "by its attributes, and by its items if it is a container too"
    CAPTURED = "in the captures, as if the region captured it"
    ARRAY = "by a copy, since an array of NumPy or Python has no version counter; in the captures if an object holds it"
    ITERATOR = "refused, since a rerun would continue where the run stopped"


@cached_by_class
def sort_of(kind: Any) -> Sort:
    """Returns how instances of `kind`, a class other than a tensor class, are recorded."""
    if kind in (list, dict, set):
        return Sort.CONTAINER
    if issubclass(kind, tuple):
        return Sort.VALUE if kind is torch.Size else Sort.TUPLE
    if kind in (types.FunctionType, types.MethodType, functools.partial) or issubclass(kind, Assembled):
        return Sort.CAPTURED
    if issubclass(kind, (nn.Module, torch.Generator)) or is_host_generator(kind):
        return Sort.CAPTURED
    if kind in (bytearray, array.array) or (kind.__module__ == "numpy" and kind.__name__ == "ndarray"):
        return Sort.ARRAY
    is_left_alone = issubclass(kind, _IMMUTABLE) or kind.__module__.partition(".")[0] in _LEFT_ALONE
    step = getattr(kind, "__next__", None)
    if step is not None and (is_left_alone or type(step) is not types.FunctionType):  # its position is in no attribute
        return Sort.ITERATOR
    if not is_left_alone and (kind.__dictoffset__ or slot_members(kind) or issubclass(kind, (list, dict, set, deque))):
        return Sort.OBJECT
    return Sort.VALUE


def slot_members(kind: Any) -> list[tuple[str, Any]]:
    """Returns the attributes that Python classes declare in `__slots__`, as (name, member descriptor)."""
    return [(name, kind.__mro__[at].__dict__[name]) for at, name in _slot_members(kind)]


@cached_by_class
def _slot_members(kind: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (at, name)
        for at, cls in enumerate(kind.__mro__)
        if "__slots__" in cls.__dict__
        for name, member in cls.__dict__.items()
        if type(member) is types.MemberDescriptorType
    )


@cached_by_class
def can_be_made(kind: Any) -> bool:
    """Whether an object of `kind` can be replaced, once it is freed, by a new instance with the same state."""
    base: Any = next(each for each in kind.__mro__ if not each.__flags__ & _OF_PYTHON)  # defines the layout in C
    is_whole = base in (object, list, dict, set, OrderedDict) and kind.__new__ is base.__new__
    return is_whole and kind.__weakrefoffset__ != 0 and not hasattr(kind, "__del__")


_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement


@cached_by_class
def has_dictionary(kind: Any) -> bool:
    """Whether instances of `kind` store their attributes in a real `__dict__` rather than a computed one."""
    own = [cls.__dict__["__dict__"] for cls in kind.__mro__ if "__dict__" in cls.__dict__]
    return bool(own) and {*map(type, own)} <= {types.GetSetDescriptorType, types.MemberDescriptorType}


_NAMESPACES = {"argparse", "collections", "types"}
_OURS = __name__.partition(".")[0]  # objects of memscale keep their present state in a rerun
_OF_THREADS = {"_asyncio", "_queue", "_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}


@cached_by_class
def is_followed(kind: Any) -> bool:
    """Whether the attributes and items of a captured instance of `kind` are state of the region."""
    if issubclass(kind, torch.Tensor):
        return False
    package = kind.__module__.partition(".")[0]
    if sort_of(kind) is Sort.OBJECT:  # in the standard library only namespaces: other threads fill queues
        return package in _NAMESPACES or (package not in sys.stdlib_module_names and package != _OURS)
    return sort_of(kind) in (Sort.CONTAINER, Sort.TUPLE)


@cached_by_class
def is_of_threads(kind: Any) -> bool:
    """Whether an instance of `kind` (a lock, a thread, a queue) marks its holder as shared between threads."""
    return kind.__module__.partition(".")[0] in _OF_THREADS


# Classes whose instances are immutable and refer to no other object.
CONSTANT = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout}


@cached_by_class
def is_plain(kind: Any) -> bool:
    """Whether the whole state of an object of `kind` is its `__dict__`."""
    is_container = issubclass(kind, (list, dict, set, deque))
    return sort_of(kind) is Sort.OBJECT and not is_container and has_dictionary(kind) and not slot_members(kind)


@cached_by_class
def is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def refuse_lazy(module: nn.Module) -> None:
    """Raises `TransformError` if `module` is lazy and has parameters or buffers without a shape."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise TransformError(
            f"the region has a {type(module).__name__}, whose parameters have no shapes yet; run a batch through that "
            "module first, then put it into the region"
        )
