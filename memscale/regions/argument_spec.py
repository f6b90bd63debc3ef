"""The arguments of a call, recorded so that a rerun can be called with the same values.

The caller keeps the tensors (`tensors`) and passes them back for a rerun. The spec records everything else. An argument
can be an object that the region changes, such as a cache that grows. The attributes of the object, and everything that
they refer to, are then state of the region. A rerun sees that state as it was, and at its end restores the present one.

Objects are referred to weakly, and the lists, dictionaries and sets in them not at all, but made again. What a region
leaves in an object has a graph, and that graph holds the record of the region: a record that held the object would
keep both forever, out of sight of Python's garbage collector. A rerun makes an object again that is gone by then.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from memscale.core import TransformError, pytrees
from memscale.regions.captures import LARGEST_CONTAINER, Captures
from memscale.regions.kinds import Sort, can_be_made, sort_of
from memscale.regions.places import Fields, read, write
from memscale.regions.shared_spec import SharedSpec, shared_spec

_MOST_OBJECTS = 4096


def arguments(args: Any, kwargs: Any, captures: Captures) -> SharedSpec | FlatSpec | ArgumentSpec:
    """Returns a spec of the arguments of a call, of the cheapest class that can rebuild them."""
    if (found := shared_spec(args, kwargs, captures)) is not None:
        return found
    leaves, spec = pytrees.flatten((args, kwargs))
    refuse_iterators(leaves)
    for leaf in leaves:
        kind: Any = type(leaf)
        if not isinstance(leaf, torch.Tensor) and sort_of(kind) is not Sort.VALUE:
            return ArgumentSpec((args, kwargs), captures)
    return FlatSpec(leaves, spec)


def refuse_iterators(leaves: list[Any]) -> None:
    """Raises `TransformError` if one of the arguments of a region that runs more than once is an iterator."""
    for leaf in leaves:
        kind: Any = type(leaf)
        if not isinstance(leaf, torch.Tensor) and sort_of(kind) is Sort.ITERATOR:
            raise TransformError(
                f"the region is given an iterator, a {kind.__name__}, and runs more than once, but the first run uses "
                "up the items; give it a list of them"
            )


class _Array(NamedTuple):
    """Marks the position of a NumPy array. The spec copies the array, since later writes to it cannot be detected."""

    then: Any


_TENSOR = object()  # marks a tensor's position among the leaves


class FlatSpec:
    """Tensors, numbers, strings and the like, in lists, tuples, dictionaries and dataclasses."""

    __slots__ = ("_spec", "_template", "direct", "tensors")

    def __init__(self, leaves: list[Any], spec: Any) -> None:
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.direct = len(self.tensors)
        self._template = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._spec = spec

    def take_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors and drops the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def again(self, values: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """Returns a context that gives the arguments with `values` in place of `tensors`."""
        remaining = iter(values)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self._template]
        return nullcontext(pytrees.unflatten(self._spec, leaves))

    def owner(self, index: int) -> str | None:
        """Returns `None`: every tensor of a flat spec is an argument itself, none belongs to an object."""
        return None


class _Slot(NamedTuple):
    """Marks the position of a tensor."""

    position: int


class _Items(NamedTuple):
    """Marks the position of a tuple that a rerun rebuilds from its items."""

    kind: type
    items: list[Any]


class _State(NamedTuple):
    """The attributes and items of a container or an object."""

    attributes: dict[str, Any]
    items: Any  # a list or a dictionary; None for an object without items

    def same(self, other: _State) -> bool:
        """Whether both hold identical objects (compared by `is`)."""
        return _parts(self) == _parts(other)


class _Node:
    """Marks the position of a container or an object, with its recorded state and a reference to it while it lives."""

    __slots__ = ("_strong", "_weak", "kind", "position", "state")

    def __init__(self, thing: Any, position: int) -> None:
        self.kind: Any = type(thing)
        self.position = position
        self.state = _State({}, None)
        self._strong: Any = thing
        self._weak: Any = None

    def let_go(self) -> None:
        """Drops the strong reference to the object, if a rerun can make the object again."""
        if self._strong is not None and sort_of(self.kind) is Sort.CONTAINER:
            self._strong = None
        elif self._strong is not None and can_be_made(self.kind):
            self._weak, self._strong = weakref.ref(self._strong), None

    def find(self) -> Any:
        """Returns the object itself, or `None` if a rerun has to make it again."""
        return self._weak() if self._weak is not None else self._strong

    def make(self) -> Any:
        """Returns a new, empty instance of the same class."""
        return self.kind.__new__(self.kind)


class ArgumentSpec:
    """Records `root` and every object reached from it, as they are now.

    Args:
        root: a tree of arguments.
        captures: the captures of the region. Modules and functions among the arguments are added to the captures, and
            objects that the captures cover are not recorded twice. With `None`, modules and functions are ignored.
        hold: keep objects and containers alive until `let_go`, and restore their contents into these same containers.

    Attributes:
        tensors: every tensor that was reached, once each.
        order: indices into `tensors` in the order of the walk; a tensor that is met twice is listed twice.

    Raises:
        TransformError: more objects are reached from `root` than can be recorded in every call.
    """

    __slots__ = ("_nodes", "_owners", "_root", "direct", "order", "tensors")

    def __init__(self, root: Any, captures: Captures | None, *, hold: bool = False) -> None:
        walk = _Walk(captures, copies=not hold)
        self._root = walk.from_root(root)
        self.tensors, self.order, self._owners, self._nodes = walk.tensors, walk.order, walk.owners, walk.nodes
        self.direct = len(self.tensors)
        if not hold:
            self.let_go()

    def let_go(self) -> None:
        """Drops the strong references to objects, so that the spec keeps none alive."""
        for node in self._nodes:
            node.let_go()

    def take_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors and drops the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def owner(self, index: int) -> str | None:
        """Returns the class name of the object that holds tensor `index`; `None` for an argument of the call."""
        return self._owners[index]

    @contextmanager
    def again(self, values: list[torch.Tensor]) -> Iterator[Any]:
        """Gives the recorded `root` with `values` in place of `tensors`, then restores the present state of objects."""
        before: list[tuple[Any, _State]] = []
        try:
            yield self._put(values, before)
        finally:
            for thing, state in reversed(before):
                _write(thing, state)

    def put(self, values: list[Any]) -> Any:
        """Returns the recorded arguments with `values`, and leaves the objects in their recorded state."""
        return self._put(values, [])

    def contents(self) -> list[tuple[Any, _State]]:
        """Returns each object that still lives, with its present state."""
        return [(thing, _read(thing)) for node in self._nodes if (thing := node.find()) is not None]

    def _put(self, values: list[Any], before: list[tuple[Any, _State]]) -> Any:
        found = [node.find() for node in self._nodes]
        things = [node.make() if thing is None else thing for node, thing in zip(self._nodes, found, strict=True)]
        for node, thing, old in zip(self._nodes, things, found, strict=True):
            if old is not None:
                before.append((thing, _read(thing)))
            _write(thing, _mapped(node.state, functools.partial(_present, values=values, things=things)))
        return _present(self._root, values, things)


class _Walk:
    """Walks a tree of arguments and builds the tree of marks that records it."""

    def __init__(self, captures: Captures | None, *, copies: bool) -> None:
        self._captures = captures
        self._copies = copies  # whether to copy arrays, so that a rerun gets arrays of its own
        self._found: dict[int, Any] = {}
        self._pending: list[tuple[_Node, Any, str | None]] = []
        self.tensors: list[torch.Tensor] = []
        self.order: list[int] = []
        self.owners: list[str | None] = []
        self.nodes: list[_Node] = []

    def from_root(self, root: Any) -> Any:
        mark = self._mark(root, None)
        for node, thing, owner in self._pending:  # the list grows during the loop
            node.state = _mapped(_read(thing), functools.partial(self._mark, owner=owner))
            if owner is not None and len(self.nodes) > _MOST_OBJECTS:
                raise TransformError(
                    f"an argument of the region leads, by way of a {owner}, to more than {_MOST_OBJECTS} objects, and "
                    "every call would have to record their state; pass the region only the objects that it uses"
                )
        return mark

    def _mark(self, value: Any, owner: str | None) -> Any:
        """Returns the mark for `value`; an immutable value is its own mark. `owner` names the class that holds it."""
        if isinstance(value, torch.Tensor):
            slot = self._found.get(id(value))
            if slot is None:
                slot = self._found[id(value)] = _Slot(len(self.tensors))
                self.tensors.append(value)
                self.owners.append(owner)
            self.order.append(slot.position)
            return slot
        kind: Any = type(value)
        sort = sort_of(kind)
        if sort is Sort.ARRAY and owner is None and self._copies:
            if id(value) not in self._found:
                self._found[id(value)] = _Array(copy.copy(value))
            return self._found[id(value)]
        if sort in (Sort.VALUE, Sort.ARRAY, Sort.ITERATOR) or (
            self._captures is not None and self._captures.covers(value)
        ):
            return value
        if sort is Sort.TUPLE:
            items = [self._mark(item, owner) for item in value]
            unchanged = all(mark is item for mark, item in zip(items, value, strict=True))
            return value if unchanged else _Items(kind, items)
        if sort is Sort.CAPTURED:
            if self._captures is not None:
                self._captures.include(value)
            return value
        if owner is not None and sort is Sort.CONTAINER and len(value) > LARGEST_CONTAINER:
            return value
        if id(value) not in self._found:
            node = self._found[id(value)] = _Node(value, len(self.nodes))
            self.nodes.append(node)
            self._pending.append((node, value, kind.__name__ if sort is Sort.OBJECT else owner))
        return self._found[id(value)]


def _present(value: Any, values: list[Any], things: list[Any]) -> Any:
    """Returns the object that the mark `value` stands for."""
    kind = type(value)
    if kind is _Slot:
        return values[value.position]
    if kind is _Node:
        return things[value.position]
    if kind is _Array:
        return copy.copy(value.then)
    if kind is _Items:
        return tuple.__new__(value.kind, [_present(item, values, things) for item in value.items])
    return value


def _read(thing: Any) -> _State:
    items: Any = None
    if isinstance(thing, dict):
        items = dict(thing.items())
    elif isinstance(thing, (list, set, deque)):
        items = list(thing)
    return _State(read(Fields(thing)), items)  # type: ignore[arg-type]  # fields have names


def _write(thing: Any, state: _State) -> None:
    if state.same(_read(thing)):  # no write: other threads may be reading it, say a frozen configuration
        return
    if state.items is not None:
        write(thing, state.items)
    write(Fields(thing), state.attributes)


def _parts(state: _State) -> list[tuple[Any, int]]:
    items = state.items
    keyed = [*state.attributes.items(), *(items.items() if isinstance(items, dict) else enumerate(items or ()))]
    return [(key, id(value)) for key, value in keyed]


def _mapped(state: _State, change: Any) -> _State:
    items = state.items
    if isinstance(items, dict):
        items = {key: change(value) for key, value in items.items()}
    elif items is not None:
        items = [change(value) for value in items]
    return _State({name: change(value) for name, value in state.attributes.items()}, items)
