"""A comparison of state slots with their recorded contents, which every call of a region makes several times."""

from __future__ import annotations

import ctypes
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

from memscale.regions.state_slots import CONTAINERS, Attributes, Content, Fields, Names, StateSlot, dictionary_of, holds


def contents_check(contents: list[tuple[StateSlot, Content]]) -> Callable[[], bool]:
    """Returns a function that tells whether every slot still holds its recorded objects, in the recorded order.

    Objects are compared by `is`: CPython keeps the references of a tuple in a row behind its head, and comparing these
    bytes takes a twentieth of the time of `is` for every object. Of attributes only the values are compared: a new name
    comes last, so another name for a value moves it, unless it was the last one. The function that collects the objects
    is one expression, which takes three quarters of the time of a loop over the slots.

    Args:
        contents: the slots and their contents, at the time of recording.
    """
    reads: list[tuple[Callable[[Any], Any], Any]] = []  # (get, place): `get(place)` returns objects that are held now
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
            own = dictionary_of(slot)
            if own:
                reads.append((dict.values, own))
            else:
                empty.append(own)
        elif kind is dict:
            reads += [(dict.keys, slot), (dict.values, slot)]
        else:
            others.append((slot, content))
    objects: Callable[[], tuple[Any, ...]] = eval(
        _reading(len(reads)),
        {f"get_{at}": get for at, (get, _) in enumerate(reads)}
        | {f"place_{at}": place for at, (_, place) in enumerate(reads)},
    )

    recorded = objects()
    row = ctypes.c_char * (len(recorded) * ctypes.sizeof(ctypes.c_void_p))
    addresses = row.from_address(id(recorded) + _HEAD).raw

    def is_current() -> bool:
        try:
            if any(empty):
                return False
            now = objects()
        except (KeyError, ValueError):  # an entry or the value of a cell was deleted
            return False
        return (
            len(now) == len(recorded)
            and row.from_address(id(now) + _HEAD).raw == addresses
            and (not others or all(holds(slot, content) for slot, content in others))
        )

    return is_current


@functools.lru_cache(maxsize=256)
def _reading(count: int) -> types.CodeType:
    """Returns the code of a function that makes a tuple of what `count` places hold."""
    held = "".join([f"*get_{at}(place_{at}), " for at in range(count)])
    return compile(f"lambda: ({held})", __file__, "eval")


_in_cell = operator.attrgetter("cell_contents", "cell_contents")  # with a single name it would return no tuple
_HEAD = tuple.__basicsize__
