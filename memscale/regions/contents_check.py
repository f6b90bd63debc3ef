"""A comparison of state slots with their recorded contents, which every call of a region makes three times.

Most slots are dictionaries of modules, whose values a prepared `operator.itemgetter` reads in one call.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from memscale.regions.state_slots import CONTAINERS, Attributes, Content, Fields, Names, StateSlot, dictionary_of, holds

_ORDINARY = {str, int}  # keys that compare in no time
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


class ContentsCheck:
    """Tells whether state slots still have their recorded contents.

    Args:
        contents: the slots and their contents, at the time of recording.
    """

    __slots__ = (
        "_cells",
        "_empty",
        "_getters",
        "_held",
        "_keys",
        "_lengths",
        "_others",
        "_sized",
        "_sizes",
        "_tables",
        "_values",
        "_views",
    )

    def __init__(self, contents: list[tuple[StateSlot, Content]]) -> None:
        self._getters: list[tuple[Callable[[Any], Iterable[Any]], Any]] = []  # of values in a dictionary
        self._held: list[Any] = []  # those values, all in one list
        self._cells: list[types.CellType] = []
        self._sized: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        self._tables: list[dict[Any, Any]] = []  # dictionaries whose order counts
        self._values: list[Any] = []  # their values, all in one list, then those of the cells
        self._empty: list[Any] = []
        self._others: list[tuple[StateSlot, Content]] = []
        in_cells: list[Any] = []
        for slot, content in contents:
            kind = type(slot)
            if not content and kind in CONTAINERS:
                self._empty.append(slot)
            elif kind is types.CellType and content:
                self._cells.append(slot)
                in_cells += content
            elif kind is Names and all(name in slot.mapping for name in slot.names):
                self._add(slot.mapping, {name: slot.mapping[name] for name in slot.names})
            elif kind is Attributes or (kind is Fields and not slot.members):
                own = dictionary_of(slot)
                self._sized.append(own)
                self._sizes.append(len(content) + (slot.bookkeeping if kind is Attributes else 0))
                # Code may give a module another table, whose contents no slot has.
                tables: Any = {name: own[name] for name in _TABLES if name in own} if kind is Attributes else {}
                self._add(own, tables | content)
            elif kind is dict and _ORDINARY.issuperset(map(type, content)):
                self._tables.append(slot)
                self._values += content.values()  # type: ignore[union-attr]
            else:
                self._others.append((slot, content))
        self._values += in_cells
        self._keys = list(chain.from_iterable(self._tables))
        self._lengths = list(map(len, self._tables))
        self._views = [table.values() for table in self._tables]  # which follow later changes

    def _add(self, mapping: dict[Any, Any], content: Any) -> None:
        if content:
            names = (*content, next(iter(content)))  # of at least two names `itemgetter` makes a tuple
            self._getters.append((operator.itemgetter(*names), mapping))
            self._held += [content[name] for name in names]

    def is_current(self) -> bool:
        """Returns whether every slot holds the recorded objects, compared by `is`, in the same order."""
        try:
            in_cells = [cell.cell_contents for cell in self._cells]
            return (
                not any(self._empty)
                and list(map(len, self._sized)) == self._sizes
                and list(map(len, self._tables)) == self._lengths
                and list(chain.from_iterable(self._tables)) == self._keys
                and all(map(operator.is_, chain(*self._views, in_cells), self._values))
                and all(map(operator.is_, chain.from_iterable([get(own) for get, own in self._getters]), self._held))
                and (not self._others or all(holds(slot, content) for slot, content in self._others))
            )
        except (KeyError, ValueError):  # an entry or the contents of a cell are gone
            return False
