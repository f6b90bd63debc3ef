"""The arguments of a call, recorded so that a rerun can be called with the same values.

The caller keeps the tensors (`tensors`) and passes them back for a rerun. The spec records everything else. An argument
can be an object that the region changes, such as a cache that grows. The attributes of the object, and everything that
the attributes refer to, are then state of the region. A rerun sees the recorded state, and restores the present state
at its end.

The spec refers to objects weakly, and has no reference to the lists, dictionaries and sets in them. A tensor that the
region stores in an object has a graph, and the graph holds the spec. A strong reference from the spec to the object
would close a cycle through C++, which Python's garbage collector does not see. A rerun makes freed objects again.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from memscale.core import TransformError
from memscale.regions.captures import LARGEST_CONTAINER, Captures
from memscale.regions.kinds import CONSTANT, Sort, can_be_made, is_dataclass, is_plain, sort_of
from memscale.regions.state_slots import Fields, read, write

_MOST_OBJECTS = 4096


def refuse_iterators(leaves: list[Any]) -> None:
    """Raises `TransformError` if one of the arguments of a region that runs more than once is an iterator."""
    for leaf in leaves:
        kind: Any = type(leaf)
        if not isinstance(leaf, torch.Tensor) and sort_of(kind) is Sort.ITERATOR:
            raise TransformError(
                f"the region is given an iterator, a {kind.__name__}, and runs more than once, but the first run uses "
                "up the items; give it a list of them"
            )


class ObjectState(NamedTuple):
    """The attributes and items of a container or an object."""

    attributes: dict[str, Any]
    items: Any  # a list or a dictionary; None for an object without items

    def same(self, other: ObjectState) -> bool:
        """Whether both hold identical objects (compared by `is`), in the same order."""
        return _same(self.attributes, other.attributes) and (
            self.items is other.items or _same(self.items, other.items)
        )


def _same(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if not isinstance(a, dict):
        return all(map(operator.is_, a, b))
    return list(a) == list(b) and all(map(operator.is_, a.values(), b.values()))


class _TensorMark:
    """Marks the position of a tensor."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class _Items(NamedTuple):
    """Marks the position of a tuple that a rerun rebuilds from its items."""

    kind: Any
    items: list[Any]


class _Array(NamedTuple):
    """Marks the position of a NumPy array. The spec copies the array, since later writes to it cannot be detected."""

    then: Any


class _Node:
    """Marks the position of a container or an object, with its recorded state and a reference to it while it lives."""

    __slots__ = ("_strong", "_weak", "kind", "position", "state")

    def __init__(self, thing: Any, position: int) -> None:
        self.kind: Any = type(thing)
        self.position = position
        self.state = _NO_STATE
        self._strong: Any = thing
        self._weak: Any = None

    def release(self) -> None:
        """Drops the strong reference to the object, if a rerun can make the object again."""
        if self._strong is None or self.kind in _CONTAINERS:
            self._strong = None
        elif can_be_made(self.kind):
            self._weak, self._strong = weakref.ref(self._strong), None

    def find(self) -> Any:
        """Returns the object itself, or `None` if a rerun has to make it again."""
        return self._weak() if self._weak is not None else self._strong

    def make(self) -> Any:
        """Returns a new, empty instance of the same class."""
        return self.kind.__new__(self.kind)


_NO_STATE = ObjectState({}, None)
_CONTAINERS = {list, dict, set}
_MARKS = {_TensorMark, _Node, _Items, _Array}


class ArgumentSpec:
    """Records the arguments of a call and every object reached from them, as they are now.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        captures: the captures of the region. Modules and functions among the arguments are added to the captures, and
            objects that the captures cover are not recorded twice. With `None`, modules and functions are ignored.
        hold: keep objects and containers alive until `release`, restore their contents into these same containers,
            and take iterators as they are.

    Attributes:
        tensors: every tensor that was reached, once each; first those that are arguments of the call.
        direct: how many of `tensors` are arguments, also by way of lists, tuples and dictionaries; objects hold the
            others.
        order: indices into `tensors` in the order of the walk; a tensor that is met twice is listed twice.

    Raises:
        TransformError: more objects are reached than can be recorded in every call, or an argument is an iterator.
    """

    __slots__ = ("_count", "_keys", "_marks", "_nodes", "_owners", "direct", "order", "tensors")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], captures: Captures | None, *, hold: bool = False
    ) -> None:
        walk = _Walk(captures, hold)
        self._count, self._keys = len(args), list(kwargs)
        self._marks = [walk.mark(value, None) for value in (*args, *kwargs.values())]
        self.direct = walk.finish()
        self.tensors, self.order, self._owners, self._nodes = walk.tensors, walk.order, walk.owners, walk.nodes
        if not hold:
            self.release()

    def release(self) -> None:
        """Drops the strong references to objects, so that the spec keeps none alive."""
        for node in self._nodes:
            node.release()

    def take_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors and drops the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def owner(self, index: int) -> str | None:
        """Returns the class name of the object that holds tensor `index`; `None` for an argument of the call."""
        return self._owners[index]

    def contents(self) -> list[tuple[Any, ObjectState]]:
        """Returns each object that still lives, with its present state."""
        found = [(thing, _read(thing)) for node in self._nodes if (thing := node.find()) is not None]
        return [(thing, ObjectState(attributes.copy(), items)) for thing, (attributes, items) in found]

    def rebuild(self, values: list[Any], before: list[tuple[Any, ObjectState]]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the recorded arguments with `values` in place of `tensors`; objects get their recorded state.

        The present states of the objects are appended to `before`, for `restore`.
        """
        things: list[Any] = []
        if self._nodes:
            found = [node.find() for node in self._nodes]
            things = [node.make() if thing is None else thing for node, thing in zip(self._nodes, found, strict=True)]
            for node, thing, old in zip(self._nodes, things, found, strict=True):
                present = _read(thing)
                if old is not None:
                    before.append((thing, ObjectState(present.attributes.copy(), present.items)))
                attributes, items = node.state
                if isinstance(items, dict):
                    items = _values(items, values, things)
                elif items is not None:
                    items = [_value(mark, values, things) for mark in items]
                _write(thing, ObjectState(_values(attributes, values, things), items), present)
        given = [_value(mark, values, things) for mark in self._marks]
        return given[: self._count], dict(zip(self._keys, given[self._count :], strict=True))


def restore(before: list[tuple[Any, ObjectState]]) -> None:
    """Restores the states of objects that `ArgumentSpec.rebuild` has appended to `before`."""
    for thing, state in reversed(before):
        _write(thing, state, _read(thing))


class _Walk:
    """Walks a tree of arguments and builds the tree of marks that records it."""

    __slots__ = ("_arguments", "_captures", "_found", "_hold", "_objects", "nodes", "order", "owners", "tensors")

    def __init__(self, captures: Captures | None, hold: bool) -> None:
        self._captures = captures
        self._hold = hold
        self._found: dict[int, Any] = {}
        self._arguments: list[tuple[_Node, Any]] = []  # containers that are arguments, with items to record
        self._objects: list[tuple[_Node, Any, str]] = []  # objects and their containers, with the object's class
        self.tensors: list[torch.Tensor] = []
        self.order: list[int] = []
        self.owners: list[str | None] = []
        self.nodes: list[_Node] = []

    def finish(self) -> int:
        """Records the contents of the containers and objects met. Returns how many tensors no object holds."""
        for node, thing in self._arguments:  # the lists grow during the loops
            self._look_through(node, thing, None)
        direct = len(self.tensors)
        for node, thing, owner in self._objects:
            self._look_through(node, thing, owner)
            if len(self.nodes) > _MOST_OBJECTS:
                raise TransformError(
                    f"an argument of the region leads, by way of a {owner}, to more than {_MOST_OBJECTS} objects, and "
                    "every call would have to record their state; pass the region only the objects that it uses"
                )
        return direct

    def _look_through(self, node: _Node, thing: Any, owner: str | None) -> None:
        attributes, items = _read(thing)
        if not self._hold and is_dataclass(node.kind):
            refuse_iterators([*attributes.values()])
        if items is not None:
            is_mapping = isinstance(items, dict)
            items = self._mapping(items, owner) if is_mapping else [self.mark(item, owner) for item in items]
        node.state = ObjectState(self._mapping(attributes, owner) if attributes else attributes, items)

    def _mapping(self, found: dict[Any, Any], owner: str | None) -> dict[Any, Any]:
        mark = self.mark
        return {key: each if type(each) in CONSTANT else mark(each, owner) for key, each in found.items()}

    def mark(self, value: Any, owner: str | None) -> Any:
        """Returns the mark for `value`; an immutable value is its own mark. `owner` names the class that holds it."""
        kind: Any = type(value)
        if kind in CONSTANT:
            return value
        known = self._found.get(id(value))
        if isinstance(value, torch.Tensor):
            if known is None:
                known = self._found[id(value)] = _TensorMark(len(self.tensors))
                self.tensors.append(value)
                self.owners.append(owner)
            self.order.append(known.position)
            return known
        if known is not None:
            return known
        sort, captures = sort_of(kind), self._captures
        if sort is Sort.TUPLE:
            items = [self.mark(item, owner) for item in value]
            return value if all(map(operator.is_, items, value)) else _Items(kind, items)
        if captures is not None and captures.covers(value):
            return value
        if sort is Sort.ARRAY and owner is None and not self._hold:
            self._found[id(value)] = array = _Array(copy.copy(value))  # each rerun gets an array of its own
            return array
        if sort is Sort.ITERATOR and owner is None and not self._hold:
            refuse_iterators([value])
        if sort in (Sort.CAPTURED, Sort.ARRAY) and captures is not None:  # an array that an object holds
            captures.include(value)
        if sort not in (Sort.CONTAINER, Sort.OBJECT) or (
            owner is not None and sort is Sort.CONTAINER and len(value) > LARGEST_CONTAINER
        ):
            return value
        node = self._found[id(value)] = _Node(value, len(self.nodes))
        self.nodes.append(node)
        if owner is None and sort is Sort.CONTAINER:
            self._arguments.append((node, value))
        else:
            self._objects.append((node, value, kind.__name__ if owner is None or sort is Sort.OBJECT else owner))
        return node


def _values(marks: dict[Any, Any], values: list[Any], things: list[Any]) -> dict[Any, Any]:
    # Tensors are looked up without a call of `_value`, since a cache of keys and values has hundreds of them.
    return {
        key: values[mark.position] if type(mark) is _TensorMark else _value(mark, values, things)
        for key, mark in marks.items()
    }


def _value(mark: Any, values: list[Any], things: list[Any]) -> Any:
    """Returns the object that `mark` stands for."""
    kind = type(mark)
    if kind not in _MARKS:
        return mark
    if kind is _TensorMark:
        return values[mark.position]
    if kind is _Node:
        return things[mark.position]
    if kind is _Array:
        return copy.copy(mark.then)
    items = [_value(item, values, things) for item in mark.items]
    # `tuple.__new__` refuses classes such as that of `torch.max`'s result; a named tuple's own `__new__` takes no list.
    return mark.kind(items) if hasattr(mark.kind, "n_sequence_fields") else tuple.__new__(mark.kind, items)


def _read(thing: Any) -> ObjectState:
    """Returns the state of `thing`. The attributes may be those of the object itself, and not a copy."""
    kind: Any = type(thing)
    if kind is list or kind is set:
        return ObjectState({}, list(thing))
    if kind is dict:
        return ObjectState({}, thing.copy())
    if is_plain(kind):
        return ObjectState(object.__getattribute__(thing, "__dict__"), None)
    fields = Fields(thing)
    items: Any = None
    if isinstance(thing, dict):
        items = dict(thing.items())
    elif isinstance(thing, (list, set, deque)):
        items = list(thing)
    return ObjectState(read(fields) if fields.members else fields.own(), items)  # type: ignore[arg-type]  # they have names


def _write(thing: Any, state: ObjectState, present: ObjectState) -> None:
    if state.same(present):  # no write: another thread may be reading `thing`, such as a configuration
        return
    if state.items is not None:
        write(thing, state.items)
    write(Fields(thing), state.attributes)
