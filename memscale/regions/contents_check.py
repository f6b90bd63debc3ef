"""A comparison of state slots with their recorded contents, which every call of a region makes several times."""

from __future__ import annotations

import ctypes
import operator
import types
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from memscale.regions.state_slots import CONTAINERS, Attributes, Content, Fields, Names, StateSlot, dictionary_of, holds

#: Calls a function without arguments.
call: Callable[[Callable[[], Any]], Any] = getattr(operator, "call", lambda function: function())  # of Python 3.11


def contents_check(contents: list[tuple[StateSlot, Content]]) -> Callable[[], bool]:
    """Returns a function that tells whether every slot still holds its recorded objects, in the recorded order.

    Objects are compared by `is`: CPython keeps the references of a tuple in a row behind its head, and comparing these
    bytes takes a twentieth of the time of `is` for every object. Of attributes only the values and the last name are
    compared: a new name comes last, so another name for any value changes one of these.

    Args:
        contents: the slots and their contents, at the time of recording.
    """
    reads: list[tuple[Callable[[Any], Any], Any]] = []  # (get, place): `get(place)` returns objects that are held now
    views: list[Iterable[Any]] = []
    attributes: list[Any] = []
    empty: list[Any] = []
    others: list[tuple[StateSlot, Content]] = []

    for slot, content in contents:
        kind = type(slot)
        if not content and kind in CONTAINERS:
            empty.append(slot)
        elif kind is types.CellType and content:
            reads.append((_in_cell, slot))
        elif kind is Names and all(name in slot.mapping for name in slot.names):
            reads.append((operator.itemgetter(*slot.names, slot.names[0]), slot.mapping))
        elif kind is Attributes or (kind is Fields and not slot.members):
            (attributes if (own := dictionary_of(slot)) else empty).append(own)
        elif kind is dict:
            views += [slot.keys(), slot.values()]
        else:
            others.append((slot, content))
    views += [own.values() for own in attributes]

    def objects() -> tuple[Any, ...]:
        return tuple(
            chain.from_iterable([*[get(place) for get, place in reads], *views, map(next, map(reversed, attributes))])
        )

    recorded = objects()
    row = ctypes.c_char * (len(recorded) * ctypes.sizeof(ctypes.c_void_p))
    addresses = row.from_address(id(recorded) + _HEAD).raw

    def is_current() -> bool:
        try:
            if any(empty):
                return False
            now = objects()
        except (KeyError, ValueError, StopIteration):  # an entry, the value of a cell or every attribute was deleted
            return False
        return (
            len(now) == len(recorded)
            and row.from_address(id(now) + _HEAD).raw == addresses
            and (not others or all(holds(slot, content) for slot, content in others))
        )

    return is_current


_in_cell = operator.attrgetter("cell_contents", "cell_contents")  # with a single name it would return no tuple
_HEAD = tuple.__basicsize__
