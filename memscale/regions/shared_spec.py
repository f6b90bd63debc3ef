"""A faster argument spec for objects that one region after the other receives, such as a cache of keys and values.

Walking a key-value cache of 48 layers in each of 48 blocks takes longer than launching the blocks, although only one
layer changes between two blocks. So the result of the walk is kept as the *object spec* of an object, and the next call
only compares attributes by identity. An object whose attributes are unchanged keeps its marks, which all calls share.

An object spec belongs to one thread and refers weakly to objects and tensors, so that it keeps nothing alive (see
`argument_spec`). It covers objects with a plain `__dict__`, lists, dictionaries and tensors; for `__slots__`, tuples
of tensors in objects, and functions, the caller falls back to `ArgumentSpec`.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from memscale.regions.captures import LARGEST_CONTAINER, Captures
from memscale.regions.kinds import Sort, is_constant, is_plain, sort_of

_MOST_OBJECTS = 4096


class _Slot:
    """Marks the position of a tensor. `owner` names the class of the object that holds it; `None` for an argument."""

    __slots__ = ("owner",)

    def __init__(self, owner: str | None) -> None:
        self.owner = owner


class _Part:
    """Marks the position of an object, a list or a dictionary.

    Attributes:
        weak: a weak reference to the object; `None` for a container, which is reached by `key` in part `parent`.
    """

    __slots__ = ("key", "kind", "owner", "parent", "weak")

    def __init__(self, kind: Any, weak: Any, parent: int, key: Any, owner: str) -> None:
        self.kind, self.weak, self.parent, self.key, self.owner = kind, weak, parent, key, owner

    def find(self) -> Any:
        """Returns the object if it still lives, else `None`; always `None` for a container."""
        return None if self.weak is None else self.weak()

    def make(self) -> Any:
        """Returns a new, empty instance of the same class."""
        return self.kind.__new__(self.kind)


class _Tuple(NamedTuple):
    """Marks the position of a tuple of tensors and values."""

    marks: list[Any]


class _Held(NamedTuple):
    """The recorded contents of a part: immutable values, and marks for everything else."""

    keys: list[Any] | None  # of a dictionary or an object; None for a list
    marks: list[Any]
    slots: list[_Slot]
    tensors: list[weakref.ref[torch.Tensor]]  # one for each of `slots`
    ids: list[int]  # ids of the keys and the values, or of the items of a list
    tensor_ids: list[int]

    def is_still_in(self, thing: Any, found: dict[Any, Any]) -> bool:
        """Whether the object `thing` has these contents, with the tensors that `found` gives for the slots.

        Contents with an object or a container in them never match.
        """
        attributes = thing.__dict__
        return (
            [*map(id, attributes), *map(id, attributes.values())] == self.ids
            and [id(found[slot]) for slot in self.slots] == self.tensor_ids
            and _Part not in map(type, self.marks)
        )


_NOTHING = _Held([], [], [], [], [], [])


class _NotPlain(Exception):
    """Raised at a value that an object spec cannot represent."""


class _ObjectSpec:
    """The objects, containers and tensors reached from an object, as of the last `look`."""

    def __init__(self, root: Any) -> None:
        name = type(root).__name__
        self.parts = [_Part(type(root), weakref.ref(root), 0, None, name)]
        self.held: list[_Held] = [_NOTHING]
        self._ids: list[list[int] | None] = [None]
        self._at: dict[int, int] = {id(root): 0}  # the index in `parts` of each object, by the object's id
        self._slots: dict[int, tuple[_Slot, weakref.ref[torch.Tensor]]] = {}

    def look(self, captures: Captures) -> dict[_Slot, torch.Tensor] | None:
        """Updates the spec and returns the tensor of each slot; `None` if a spec cannot represent the object."""
        contents: list[Any] = []
        things: list[int] = []
        parts, ids = self.parts, self._ids
        index = 0
        while index < len(parts):  # the list may grow during the loop
            part = parts[index]
            if part.weak is None:
                thing = content = contents[part.parent][part.key]
            else:
                thing = part.weak()
                content = None if thing is None else thing.__dict__
            if type(thing) is not part.kind:
                return None
            things.append(id(thing))
            contents.append(content)
            now = [*map(id, content)] if part.kind is list else [*map(id, content), *map(id, content.values())]
            if now != ids[index]:
                try:
                    self.held[index] = self._marked(index, content, now)
                except _NotPlain:
                    return None
                ids[index] = now
            index += 1
        # An object in two places, or one that the region also captures, must stay one object in a rerun.
        if len(set(things)) < len(things) or not captures.covers_none(things):
            return None
        found = dict(
            zip(
                chain.from_iterable([held.slots for held in self.held]),
                [tensor() for held in self.held for tensor in held.tensors],
                strict=True,
            )
        )
        # The ids of a freed tensor prove nothing: another object may have got its address.
        if any(tensor is None for tensor in found.values()):
            return None
        if len(self._slots) > 64 + 4 * len(found):  # most slots belong to freed tensors
            self._slots = {id(tensor): self._slots[id(tensor)] for tensor in found.values()}
        return found  # type: ignore[return-value]

    def _marked(self, index: int, content: Any, ids: list[int]) -> _Held:
        before = {id(mark) for mark in self.held[index].marks if type(mark) is _Part}
        if len(content) > LARGEST_CONTAINER:
            raise _NotPlain
        is_list = type(content) is list
        keys = None if is_list else list(content)
        if keys is not None and not all(type(key) in (str, int) for key in keys):
            raise _NotPlain
        held = _Held(keys, [], [], [], ids, [])
        for key, value in enumerate(content) if is_list else content.items():
            held.marks.append(self._mark(value, index, key, held))
        if not before <= {id(mark) for mark in held.marks if type(mark) is _Part}:
            raise _NotPlain  # a part that is no longer referred to may be freed
        return held

    def _mark(self, value: Any, index: int, key: Any, held: _Held) -> Any:
        part = self.parts[index]
        if isinstance(value, torch.Tensor):
            slot, tensor = self._slots.get(id(value), (None, None))
            if slot is None or tensor is None or tensor() is not value:
                slot, tensor = self._slots[id(value)] = _Slot(part.owner), weakref.ref(value)
            held.slots.append(slot)
            held.tensors.append(tensor)
            held.tensor_ids.append(id(value))
            return slot
        kind: Any = type(value)
        if is_constant(kind) or (kind is tuple and all(is_constant(type(item)) for item in value)):
            return value
        sort = sort_of(kind)
        if sort is Sort.CONTAINER and kind is not set:
            return self._container(value, index, key)
        if sort is Sort.OBJECT and is_plain(kind):
            at = self._at.get(id(value))
            if at is not None and self.parts[at].find() is value:
                return self.parts[at]
            return self._new(_Part(kind, weakref.ref(value), index, key, kind.__name__), value)
        raise _NotPlain

    def _container(self, value: Any, index: int, key: Any) -> _Part:
        """Returns the part for a list or dictionary; a container at the same key as before gets the same part."""
        held = self.held[index]
        keys = range(len(held.marks)) if held.keys is None else held.keys
        for then, mark in zip(keys, held.marks, strict=True):
            if type(mark) is _Part and then == key and mark.weak is None and mark.kind is type(value):
                return mark
        return self._new(_Part(type(value), None, index, key, self.parts[index].owner), None)

    def _new(self, part: _Part, thing: Any) -> _Part:
        if len(self.parts) >= _MOST_OBJECTS:
            raise _NotPlain  # `ArgumentSpec` raises the error about too many objects
        if thing is not None:
            self._at[id(thing)] = len(self.parts)
        self.parts.append(part)
        self.held.append(_NOTHING)
        self._ids.append(None)
        return part


def _is_value(value: Any) -> bool:
    kind: Any = type(value)
    return not isinstance(value, torch.Tensor) and sort_of(kind) is Sort.VALUE


class _Local(threading.local):
    def __init__(self) -> None:
        # By the id of the object: a weak reference that removes the entry, and the spec; None: no spec is possible.
        self.specs: dict[int, tuple[weakref.ref[Any], _ObjectSpec | None]] = {}


_local = _Local()


def _look(thing: Any, captures: Captures) -> tuple[_ObjectSpec, dict[_Slot, torch.Tensor]] | None:
    specs, key = _local.specs, id(thing)
    known = specs.pop(key, None)  # popped first, so that an interrupted look leaves no half-updated spec
    spec, found = _ObjectSpec(thing), None
    if known is not None and known[0]() is thing:
        if known[1] is None:
            specs[key] = known
            return None
        if (found := known[1].look(captures)) is not None:
            spec = known[1]
    if found is None:
        found = spec.look(captures)
    specs[key] = weakref.ref(thing, lambda _: specs.pop(key, None)), None if found is None else spec
    return None if found is None else (spec, found)


def shared_spec(args: tuple[Any, ...], kwargs: dict[str, Any], captures: Captures) -> SharedSpec | None:
    """Returns a spec of the arguments of a call; `None` if one of them is an object without an object spec.

    Tensors, immutable values and tuples of these need no spec.
    """
    values = [*args, *kwargs.values()]
    objects: dict[int, Any] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            continue
        kind: Any = type(value)
        sort = sort_of(kind)
        if sort is Sort.VALUE or (
            kind is tuple and all(isinstance(item, torch.Tensor) or _is_value(item) for item in value)
        ):
            continue
        # `FlatSpec` records a dataclass by its fields.
        if not is_plain(kind) or hasattr(kind, "__dataclass_fields__") or not captures.covers_none([id(value)]):
            return None
        objects[id(value)] = value
    specs: list[_ObjectSpec] = []
    of_objects: dict[_Slot, torch.Tensor] = {}
    for thing in objects.values():
        if (known := _look(thing, captures)) is None:
            return None
        specs.append(known[0])
        of_objects.update(known[1])
    of_tensor = {id(tensor): slot for slot, tensor in of_objects.items()}
    parts = [part for spec in specs for part in spec.parts]
    if len(specs) > 1:
        # An object reached from two arguments has a part in both specs, and would become two objects in a rerun.
        found = [id(thing) for part in parts if (thing := part.find()) is not None]
        if len(set(found)) < len(found) or len(of_tensor) < len(of_objects):
            return None
    roots = {key: spec.parts[0] for key, spec in zip(objects, specs, strict=True)}
    slots: dict[_Slot, torch.Tensor] = {}

    def slot_of(tensor: torch.Tensor) -> _Slot:
        slot = of_tensor.get(id(tensor))
        if slot is None:
            slot = of_tensor[id(tensor)] = _Slot(None)
        slots[slot] = tensor
        return slot

    # Without recursion: a recursive closure is a reference cycle and would keep the tensors until a garbage collection.
    marks = [
        slot_of(value)
        if isinstance(value, torch.Tensor)
        else _Tuple([slot_of(item) if isinstance(item, torch.Tensor) else item for item in value])
        if type(value) is tuple
        else roots.get(id(value), value)
        for value in values
    ]
    direct = len(slots)
    slots.update(of_objects)
    held = [each for spec in specs for each in spec.held]
    return SharedSpec(marks, len(args), list(kwargs), slots, direct, parts, held)


class SharedSpec:
    """The arguments of a call, recorded by marks that several calls share.

    Attributes:
        tensors: every tensor that was reached, arguments first.
        direct: how many of `tensors` are arguments; objects hold the others.
    """

    __slots__ = ("_count", "_held", "_keys", "_marks", "_parts", "_slots", "direct", "tensors")

    def __init__(
        self,
        marks: list[Any],
        count: int,
        keys: list[str],
        slots: dict[_Slot, torch.Tensor],
        direct: int,
        parts: list[_Part],
        held: list[_Held],
    ) -> None:
        self._marks, self._count, self._keys = marks, count, keys
        self._slots, self.tensors = list(slots), list(slots.values())
        self.direct, self._parts, self._held = direct, parts, held

    def take_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors and drops the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def owner(self, index: int) -> str | None:
        """Returns the class name of the object that holds tensor `index`; `None` for an argument of the call."""
        return self._slots[index].owner

    @contextmanager
    def again(self, values: list[torch.Tensor]) -> Iterator[Any]:
        """Gives the arguments with `values` in place of `tensors`, then restores the present state of the objects."""
        found: dict[Any, Any] = dict(zip(self._slots, values, strict=True))
        olds = [part.find() for part in self._parts]
        things = [part.make() if old is None else old for part, old in zip(self._parts, olds, strict=True)]
        found.update(zip(self._parts, things, strict=True))
        before: list[tuple[Any, dict[str, Any]]] = []
        try:
            for held, thing, old in zip(self._held, things, olds, strict=True):
                if old is not None and held.is_still_in(thing, found):
                    before.append((thing, thing.__dict__.copy()))
                    continue
                contents = [found[mark] if type(mark) in _MARKS else mark for mark in held.marks]
                if held.keys is None:
                    thing.extend(contents)
                elif type(thing) is dict:
                    thing.update(zip(held.keys, contents, strict=True))
                else:
                    if old is not None:
                        before.append((thing, thing.__dict__.copy()))
                    _write(thing, dict(zip(held.keys, contents, strict=True)))
            given = [_present(mark, found) for mark in self._marks]
            yield given[: self._count], dict(zip(self._keys, given[self._count :], strict=True))
        finally:
            for thing, was in reversed(before):
                _write(thing, was)


_MARKS = {_Slot, _Part}


def _present(mark: Any, found: dict[Any, Any]) -> Any:
    if type(mark) is _Tuple:
        return tuple([_present(item, found) for item in mark.marks])
    return found[mark] if type(mark) in _MARKS else mark


def _write(thing: Any, state: dict[str, Any]) -> None:
    now = thing.__dict__
    if len(now) == len(state) and list(now) == list(state) and all(map(operator.is_, now.values(), state.values())):
        return  # no write: other threads may be reading it, say a frozen configuration
    now.clear()
    now.update(state)
