"""State slots: the locations of a region's state (dictionaries, cells, attributes, arrays), read and written."""

from __future__ import annotations

import copy
import itertools
import operator
import types
from collections import OrderedDict, deque
from typing import Any

from torch import nn

from memscale.core import CorrectnessError
from memscale.regions.kinds import Sort, has_dictionary, slot_members, sort_of

# The attributes that every module has. Captures visit the relevant ones (parameters, buffers, children) by name.
INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
CONTAINERS = (OrderedDict, dict, list, set, deque)


ABSENT: Any = object()


class Names:
    """The entries of a dictionary that code refers to by name: globals, or attributes that a method reads.

    Entries that are Python modules or classes are skipped.
    """

    __slots__ = ("mapping", "names")

    def __init__(self, mapping: dict[str, Any], names: tuple[str, ...]) -> None:
        self.mapping = mapping
        self.names = names

    def items(self) -> dict[str, Any]:
        """Returns the present entries."""
        found = [(name, self.mapping.get(name, ABSENT)) for name in self.names]
        return {name: value for name, value in found if value is not ABSENT and not isinstance(value, _CODE)}


_CODE = (types.ModuleType, type)


class Attributes:
    """The attributes that a user gave to a module, and `training`; other attributes of `nn.Module` are skipped."""

    __slots__ = ("bookkeeping", "mapping")

    def __init__(self, mapping: dict[str, Any], bookkeeping: int) -> None:
        self.mapping = mapping
        self.bookkeeping = bookkeeping  # how many entries of `mapping` belong to `nn.Module` itself


class Fields:
    """The attributes of an object other than a module, in its `__dict__` and in its `__slots__`."""

    __slots__ = ("has_dictionary", "members", "thing")

    def __init__(self, thing: Any) -> None:
        kind: Any = type(thing)
        self.thing = thing
        self.members = slot_members(kind)
        self.has_dictionary = has_dictionary(kind)

    def own(self) -> dict[str, Any]:
        """Returns the `__dict__`, bypassing a custom `__getattribute__` (transformers' configurations have one)."""
        return object.__getattribute__(self.thing, "__dict__") if self.has_dictionary else {}


# dict | list | set | deque | tuple (never written) | bytearray, or an array of NumPy or Python | types.CellType
# | Names | Attributes | Fields
StateSlot = Any
Content = dict[Any, Any] | list[Any]  # of an array: a list with a copy of the array


def read(slot: StateSlot) -> Content:
    """Returns a copy of the contents of `slot`: a dictionary for named entries, a list otherwise."""
    if type(slot) is dict:
        return dict(slot)
    if isinstance(slot, dict):
        # Without a custom `__getitem__`: that of transformers' ACT2FN makes a new module in each call.
        own: Any = OrderedDict if isinstance(slot, OrderedDict) else dict
        return dict(own.items(slot))
    if isinstance(slot, Attributes):
        return {key: value for key, value in slot.mapping.items() if key not in INTERNAL}
    if isinstance(slot, Fields):
        fields = slot.own().copy()
        for name, member in slot.members:
            try:
                fields[name] = member.__get__(slot.thing)
            except AttributeError:  # an unset slot
                continue
        return fields
    if isinstance(slot, types.CellType):
        try:
            return [slot.cell_contents]
        except ValueError:  # an empty cell, of a local variable before its assignment
            return []
    if isinstance(slot, Names):
        return slot.items()
    return [copy.copy(slot)] if sort_of(type(slot)) is Sort.ARRAY else list(slot)


def number_of_entries(array: Any) -> int:
    """Returns the number of entries of an array of NumPy or Python, or of a bytearray."""
    return array.size if hasattr(array, "size") else len(array)


def can_be_written(array: Any) -> bool:
    """Whether `array` is an array of Python, a bytearray, or an array of NumPy that is not read-only."""
    return not hasattr(array, "flags") or array.flags.writeable


def _bytes_of(array: Any) -> bytes:
    return bytes(array) if isinstance(array, bytearray) else array.tobytes()


def dictionary_of(slot: StateSlot) -> Any:
    """Returns the dictionary that stores the whole contents of `slot`, or `None` if no single dictionary does."""
    if isinstance(slot, Attributes):
        return slot.mapping
    if isinstance(slot, Fields):
        return None if slot.members else slot.own()
    return slot if isinstance(slot, dict) else None


def write(slot: StateSlot, content: Content) -> None:
    """Restores in `slot` the contents that `read` returned for it."""
    if isinstance(slot, Attributes):
        for key in read(slot):
            if key not in content:
                del slot.mapping[key]
        slot.mapping.update(content)
    elif isinstance(slot, Fields):
        fields = dict(content)
        for name, member in slot.members:
            if name in fields:
                member.__set__(slot.thing, fields.pop(name))
            elif hasattr(slot.thing, name):
                member.__delete__(slot.thing)
        if slot.has_dictionary:
            mapping = slot.own()
            for name in [name for name in mapping if name not in fields]:
                del mapping[name]
            mapping.update(fields)
    elif isinstance(slot, types.CellType):
        if content:
            slot.cell_contents = content[0]
        else:
            del slot.cell_contents
    elif isinstance(slot, Names):
        for name in slot.items():
            if name not in content:
                del slot.mapping[name]
        slot.mapping.update(content)
    elif type(slot) is dict and list(slot) == list(content):
        slot.update(content)  # without `clear`, for other threads may be reading it
    elif sort_of(type(slot)) is Sort.ARRAY:
        slot[... if hasattr(slot, "flags") else slice(None)] = content[0]  # `...`, as an array may have no dimensions
    elif isinstance(slot, tuple):
        raise CorrectnessError(
            "the region captures a tuple with a tensor that was frozen or unfrozen since the region ran. The recompute "
            "needs the tensor as it was, and cannot write to a tuple; keep the tensor in a list"
        )
    else:
        # The methods of the builtin class: those of a subclass may do more (a Counter adds up) or raise.
        own: Any = next(base for base in CONTAINERS if isinstance(slot, base))
        own.clear(slot)
        (own.extend if own in (list, deque) else own.update)(slot, content)


def holds(slot: StateSlot, content: Content) -> bool:
    """Whether `slot` holds exactly the objects of `content`, in the same order if it has one.

    Objects are compared by `is`, the numbers of an array by their bytes.
    """
    kind = type(slot)
    if kind is Names and len(slot.names) == len(content) == 1:
        return slot.mapping.get(slot.names[0], ABSENT) is content[slot.names[0]]
    if kind is Attributes or (kind is Fields and not slot.members):
        mapping, besides = (slot.mapping, slot.bookkeeping) if kind is Attributes else (slot.own(), 0)
        return len(mapping) == besides + len(content) and all(
            map(operator.is_, map(mapping.get, content, _ABSENTS), content.values())  # type: ignore[union-attr]
        )
    if sort_of(kind) is Sort.ARRAY:
        return _bytes_of(slot) == _bytes_of(content[0])
    now = slot if isinstance(slot, (dict, list, tuple)) else read(slot)
    if len(now) != len(content) or not all(map(operator.is_, now, content)):
        return False
    return not isinstance(now, dict) or all(map(operator.is_, now.values(), content.values()))  # type: ignore[union-attr]


_ABSENTS = itertools.repeat(object())  # the default for `mapping.get`: an attribute may have the value None


def differing(a: Content, b: Content) -> list[str]:
    """Returns the names whose objects differ between the attributes `a` and `b`."""
    assert isinstance(a, dict)
    assert isinstance(b, dict)
    return [name for name in {**a, **b} if a.get(name, ABSENT) is not b.get(name, ABSENT)]
