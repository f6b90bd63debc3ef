"""Removal of the simulation's tensors that outlive it, such as in a cache of another file.

NOTE: a later computation would read such a tensor without values. The tensor is removed from its containers, which are
then as before the simulation. In an attribute or under a name, a tensor that depends on constants alone is computed for
real, in place; for any other tensor they become None. A tensor that still has a holder raises an error.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import compress, repeat
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import ConfigError
from memscale.simulation.dispatch.lazy_values import TooLarge, of_any_size
from memscale.simulation.dispatch.live_storages import LiveStorages
from memscale.simulation.dispatch.trace_builder import StorageRecord
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.process.process_state import all_objects_seen, is_from_before

_Cached = type(functools.lru_cache(maxsize=1)(lambda: None))
_DEEPEST = 8  # the most references from a tensor up to a holder
_PASSES = 3
_FEW = 500  # the most objects whose holders Python's own search finds faster


class Made(NamedTuple):
    """A storage of a simulation, with its record."""

    storage: weakref.ref[torch.UntypedStorage]
    record: StorageRecord


class LeftBehind:
    """The storages of a simulation that are alive at its end, for a search after all other state is restored.

    Args:
        storages: the live storages of the simulation, before its end.
    """

    def __init__(self, storages: LiveStorages) -> None:
        self._made = [Made(*each) for each in storages.made()]

    def clear(self, *, refuses: bool) -> None:
        """Computes or removes every remaining tensor.

        Args:
            refuses: whether to raise an error for remaining tensors; False while another error holds the step's frames.

        Raises:
            ConfigError: an object holds a tensor that cannot be removed from it.
        """
        if not self._alive():
            return
        gc.collect()
        if self._alive():
            with all_objects_seen():
                self._clear(refuses=refuses)

    def _clear(self, *, refuses: bool) -> None:
        alive: dict[int, StorageRecord] = {}
        for _ in range(_PASSES):
            before, alive = alive, self._alive()
            found = _tensors_over(alive) if alive.keys() != before.keys() else None  # unchanged: stop
            if not found:
                break  # held in C++ alone, such as by a graph without a Python object
            _settle(found, alive)
            del found
        if refuses:
            _refuse(_Own(each for tensors in _tensors_over(self._alive()).values() for each in tensors))

    def _alive(self) -> dict[int, StorageRecord]:
        self._made = [each for each in self._made if each.storage() is not None]
        return {
            storage._cdata: each.record
            for each in self._made
            if (storage := each.storage()) is not None and storage.nbytes() and not _is_right(each.record)
        }


def _settle(found: dict[int, _Own], alive: dict[int, StorageRecord]) -> None:
    """Removes tensors from containers; those that attributes hold are computed in place, or removed too."""
    made = {key: _Own(each for each in tensors if not is_from_before(each)) for key, tensors in found.items()}
    whole = {key for key in found if len(made[key]) == len(found[key])}
    stuck = _taken_out(_Own(each for key in whole for each in made[key]), attributes=False)
    rest = (key for key in found if key not in whole or not stuck.isdisjoint(map(id, made[key])))
    _taken_out(
        _Own(each for key in rest if not _computed(found[key], alive[key]) for each in made[key]), attributes=True
    )


def _is_right(record: StorageRecord) -> bool:
    """Whether the storage has the values that a real step would have."""
    return record.known and record.later is None and not record.guess


def _tensors_over(alive: dict[int, Any]) -> dict[int, _Own]:
    """Returns the Python tensors over each storage of `alive`, by the storage's address."""
    found: dict[int, _Own] = {}
    seen: set[int] = set()
    rest = _all_tensors() if alive else _Own()
    while rest:
        tensor = rest.pop()
        if id(tensor) in seen or tensor.layout is not torch.strided:
            continue
        seen.add(id(tensor))
        with suppress(RuntimeError):  # a wrapper has no storage (NotImplementedError)
            key = tensor.untyped_storage()._cdata
            if key in alive:
                found.setdefault(key, _Own()).append(tensor)
                if tensor._base is not None:
                    rest.append(tensor._base)
    return found


def _all_tensors() -> _Own:
    """Returns all tensors that Python's garbage collector tracks; the filter runs no Python code of the objects."""
    everything = gc.get_objects()
    return _Own(compress(everything, map(issubclass, map(type, everything), repeat(torch.Tensor))))


def _computed(tensors: _Own, record: StorageRecord) -> bool:
    """Computes the values of `tensors`, all over one storage, in place; returns whether that was possible."""
    later, nbytes = record.later, tensors[0].untyped_storage().nbytes()
    if later is None or record.guess:
        return False
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes(), of_any_size():
            value = later.value({})
            whole = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
            FakeStorages.tensor(whole, *later.layout).copy_(value)
            for tensor in tensors:
                layout = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                tensor.data = FakeStorages.tensor(whole, *layout)
    except (TooLarge, RuntimeError):
        return False
    return True


class _Own(list[Any]):
    """A list of this file, which the search for holders skips."""


class _Wanted(NamedTuple):
    """An object to be removed from its holders.

    Attributes:
        root: the id of the tensor that leads to the object.
        thing: the tensor, or an object of the step that holds the tensor.
        entry: the entry to remove, if `thing` is a dict; else None.
    """

    root: int
    thing: Any
    entry: Any = None


def _holders_of(things: _Own) -> dict[int, _Own]:
    """Returns id of each of `things` -> the objects that refer to it, without running frames and this file's own lists.

    One pass over all tracked objects serves all `things`. Python's own compares each reference with each of `things`,
    which for many takes longer than a look at all objects from here.
    """
    found = {id(each): _Own() for each in things}
    keys = found.keys()
    for holder in _Own(gc.get_referrers(*things) if len(things) <= _FEW else gc.get_objects()):
        referents = gc.get_referents(holder)
        if not keys.isdisjoint(map(id, referents)) and not issubclass(type(holder), (types.FrameType, _Own, _Wanted)):
            for key in keys & set(map(id, referents)):
                found[key].append(holder)
        del referents
    return found


def _refuse(tensors: _Own) -> None:
    kept = next(((each, each) for each in tensors if is_from_before(each)), None) or _keeper(tensors)
    if kept is not None:
        tensor, keeper = kept
        raise ConfigError(
            f"the step stores a simulated tensor of shape {tuple(tensor.shape)}, which has no values, in a "
            f"{type(keeper).__name__}, and memscale cannot remove the tensor: the next real step would read it. Store "
            "such tensors in an attribute of a module, or in a dict or list that the code names"
        )


def _keeper(tensors: _Own) -> tuple[torch.Tensor, Any] | None:
    """Returns one of `tensors` with an older object that holds it; None if only running code holds them."""
    frontier, visited = _Own(_Wanted(id(each), each) for each in tensors), {id(each) for each in tensors}
    for _ in range(_DEEPEST):
        holders, above = _holders_of(_Own(each.thing for each in frontier)), _Own()
        for wanted in frontier:
            for holder in holders[id(wanted.thing)]:
                if isinstance(holder, torch.Tensor) or id(holder) in visited:
                    continue
                if is_from_before(holder):
                    return next(each for each in tensors if id(each) == wanted.root), _owner(holder, wanted.thing)
                visited.add(id(holder))
                above.append(_Wanted(wanted.root, holder))
        if not above:
            break
        frontier = above
    return None


def _owner(holder: Any, thing: Any) -> Any:
    """Returns the object that has `holder` as its ``__dict__``; `holder` itself if no object has."""
    owners = _holders_of(_Own([holder]))[id(holder)] if isinstance(holder, dict) else _Own()
    return next((each for each in owners if _has_as_attributes(each, holder, thing)), holder)


def _taken_out(tensors: _Own, *, attributes: bool) -> frozenset[int]:
    """Removes `tensors` from their containers, and with `attributes` sets attributes that hold one to None.

    Returns:
        The ids of the tensors that still have a holder.
    """
    frontier, stuck = _Own(_Wanted(id(each), each) for each in tensors), set()
    visited = {(each.root, id(each.thing), id(None)) for each in frontier}
    for _ in range(_DEEPEST + 2):
        holders, above = _holders_of(_Own(each.thing for each in frontier)), _Own()
        for wanted in frontier:
            has = holders[id(wanted.thing)]
            if wanted.entry is not None:
                following = _out_of_dict(wanted, has, attributes)
            else:
                following = _Own(_let_go(each, wanted, attributes) for each in has)
            for each in following:
                if each is False:
                    stuck.add(wanted.root)
                elif each is not True and (key := (each.root, id(each.thing), id(each.entry))) not in visited:
                    visited.add(key)  # visit each object once, since references form cycles
                    above.append(each)
        if not above:
            break
        frontier = above
    return frozenset(stuck)


def _let_go(holder: Any, wanted: _Wanted, attributes: bool) -> bool | _Wanted:
    """Removes `wanted` from `holder`. Returns True on success, False on failure, or the next object to remove."""
    if isinstance(holder, torch.Tensor):  # a view, which keeps its base alive, is removed by itself
        return True
    if isinstance(holder, _Cached):
        holder.cache_clear()
        return True
    if isinstance(holder, dict):
        return _Wanted(wanted.root, holder, wanted.thing)
    if isinstance(holder, (list, deque, set)) and is_from_before(holder):
        kept = _Own(each for each in holder if each is not wanted.thing)
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(kept)
        return True
    if isinstance(holder, types.CellType) and is_from_before(holder):
        if attributes:
            holder.cell_contents = None
        return attributes
    if is_from_before(holder) and (names := [*_names_of(holder, wanted.thing)]):
        for name in names if attributes else ():
            with suppress(Exception):  # a property of the class may raise; `_refuse` reports what remains
                setattr(holder, name, None)
        return attributes
    # An object of the step (a tuple, an instance, a closure) is removed as a whole.
    return _Wanted(wanted.root, holder)


def _out_of_dict(wanted: _Wanted, holders: _Own, attributes: bool) -> _Own:
    """Removes `wanted` from a dict, as `_let_go` does for other containers."""
    root, table, entry = wanted
    owners = _Own(each for each in holders if _has_as_attributes(each, table, entry))
    if not owners:
        # A plain dict loses its entry whatever its age: the garbage collector counts an old dict that was empty as new.
        for key in [key for key, value in table.items() if value is entry or key is entry]:
            del table[key]
        return _Own([True])
    owner = owners[0]
    if not isinstance(owner, (types.ModuleType, type)) and not is_from_before(owner):
        return _Own([_Wanted(root, owner)])
    if attributes:
        for name in _names_of(owner, entry):
            setattr(owner, name, None)
    return _Own([attributes])


def _has_as_attributes(owner: Any, table: dict[Any, Any], thing: Any) -> bool:
    if isinstance(owner, type):
        return any(value is thing for value in vars(owner).values())
    return getattr(owner, "__dict__", None) is table


def _names_of(owner: Any, thing: Any) -> Iterator[str]:
    """Yields the names of the attributes of `owner` that are `thing`."""
    with suppress(TypeError):
        yield from [name for name, value in vars(owner).items() if value is thing]
    for cls in type(owner).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if getattr(owner, name, None) is thing:
                yield name
