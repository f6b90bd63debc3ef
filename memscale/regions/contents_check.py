"""A comparison of state slots with their recorded contents, which every call of a region makes three times.

The comparison runs in C: `map` reads the slots, and `all(map(is_, ...))` compares the objects.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from memscale.regions.state_slots import CONTAINERS, Attributes, Content, Fields, Names, StateSlot, dictionary_of, holds

_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
#: Calls a function without arguments.
call: Callable[[Callable[[], Any]], Any] = getattr(operator, "call", lambda function: function())  # of Python 3.11


def contents_check(contents: list[tuple[StateSlot, Content]]) -> Callable[[], bool]:
    """Returns a function that tells whether every slot still holds its recorded objects, in the recorded order.

    Objects are compared by `is`.

    Args:
        contents: the slots and their contents, at the time of recording.
    """
    reads: list[Callable[[], Iterable[Any]]] = []  # each returns some of the objects that the slots hold now
    recorded: list[Any] = []  # what `reads` returned when the contents were recorded, all in one list
    sized: list[Any] = []
    sizes: list[int] = []
    empty: list[Any] = []
    others: list[tuple[StateSlot, Content]] = []

    def add_entries(mapping: dict[Any, Any], entries: Any) -> None:
        if entries:
            names = [*entries]
            if len(names) == 1:  # `itemgetter` would return no tuple
                names += names
            reads.append(partial(operator.itemgetter(*names), mapping))
            recorded.extend([entries[name] for name in names])

    for slot, content in contents:
        kind = type(slot)
        if not content and kind in CONTAINERS:
            empty.append(slot)
        elif kind is types.CellType and content:
            reads.append(partial(_in_cell, slot))
            recorded += [*content, *content]
        elif kind is Names and all(name in slot.mapping for name in slot.names):
            add_entries(slot.mapping, {name: slot.mapping[name] for name in slot.names})
        elif kind is Attributes or (kind is Fields and not slot.members):
            own = dictionary_of(slot)
            sized.append(own)
            sizes.append(len(content) + (slot.bookkeeping if kind is Attributes else 0))
            # Code may replace a module's table by another dictionary, whose contents no slot has recorded.
            tables: Any = {name: own[name] for name in _TABLES if name in own} if kind is Attributes else {}
            add_entries(own, tables | content)
        elif kind is dict:
            sized.append(slot)
            sizes.append(len(content))
            reads += [slot.keys, slot.values]  # in the order of the dictionary: another order is a change
            recorded += [*content, *content.values()]  # type: ignore[union-attr]
        else:
            others.append((slot, content))

    def is_current() -> bool:
        try:
            return (
                not any(empty)
                and list(map(len, sized)) == sizes
                and all(map(operator.is_, chain.from_iterable(map(call, reads)), recorded))
                and (not others or all(holds(slot, content) for slot, content in others))
            )
        except (KeyError, ValueError):  # an entry of a dictionary or the value of a closure cell was deleted
            return False

    return is_current


_in_cell = operator.attrgetter("cell_contents", "cell_contents")  # with a single name it would return no tuple
