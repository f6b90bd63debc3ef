"""What a simulated step has left where nobody puts it back, such as a cache of some other file: it must not stay.

Whoever computes next would take a tensor without values for what it stands for. What follows from constants alone is
computed for real, in place, so that everybody who has it has the right numbers. What does not, or is thought on a card,
is taken out of the containers that it is in, which then are as they were before; an attribute or a name that held it
holds None. What is still there after that is refused.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import ConfigError
from memscale.simulation.dispatch.hollow import HollowStorages
from memscale.simulation.dispatch.live_storages import LiveStorages
from memscale.simulation.dispatch.postponed import TooLarge, of_any_size
from memscale.simulation.ledger import StorageRecord
from memscale.simulation.sandbox.garbage import all_objects_seen, is_from_before

_Cached = type(functools.lru_cache(maxsize=1)(lambda: None))
_DEEPEST = 8  # how far up from a tensor its holders are looked for
_PASSES = 3


class Made(NamedTuple):
    """A storage of a simulation, and what is known of it."""

    storage: weakref.ref[torch.UntypedStorage]
    record: StorageRecord


class LeftBehind:
    """What is alive of a simulation, to be looked at when all that it can put back is as it was.

    Args:
        storages: of the simulation, before it ends.
        on_card: whether they are thought on a card, where nothing that is made here could take their place.
    """

    def __init__(self, storages: LiveStorages, *, on_card: bool) -> None:
        self._made = [Made(*each) for each in storages.made()]
        self._on_card = on_card

    def clear(self, *, refuses: bool) -> None:
        """Leave none.

        Args:
            refuses: whether to raise for what stays; an error that is on its way has the step's frames with it.

        Raises:
            ConfigError: something has one that it cannot be taken from.
        """
        if not self._alive():
            return
        gc.collect()
        if self._alive():
            with all_objects_seen():
                self._clear(refuses=refuses)

    def _clear(self, *, refuses: bool) -> None:
        for turn in range(_PASSES):
            alive = self._alive()
            found = _tensors_over(alive)
            if not found:
                return  # in C++ alone, as a graph that nobody can ask for
            for key, tensors in found.items():
                self._settle(tensors, alive[key], takes=turn == 0)
            del found, tensors
        for tensors in _tensors_over(self._alive()).values() if refuses else ():
            for tensor in tensors:
                _refuse(tensor, [tensors])

    def _alive(self) -> dict[int, StorageRecord]:
        self._made = [each for each in self._made if each.storage() is not None]
        return {
            storage._cdata: each.record
            for each in self._made
            if (storage := each.storage()) is not None and storage.nbytes() and not _is_right(each.record)
        }

    def _settle(self, tensors: list[torch.Tensor], record: StorageRecord, *, takes: bool) -> None:
        made = [tensor for tensor in tensors if not is_from_before(tensor)]
        if takes and self._on_card and not record.away and len(made) == len(tensors):
            taken = [_taken_out(tensor, [made, tensors], attributes=False) for tensor in made]
            if all(taken):
                return
        if not _computed(tensors, record):
            for tensor in made:
                _taken_out(tensor, [made, tensors], attributes=True)


def _is_right(record: StorageRecord) -> bool:
    """Whether its values are what a real step would have."""
    return record.known and record.later is None and not record.guess


def _tensors_over(alive: dict[int, Any]) -> dict[int, list[torch.Tensor]]:
    """All tensors of Python over these storages, by these."""
    found: dict[int, list[torch.Tensor]] = {}
    seen: set[int] = set()
    rest = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]  # asks no object anything
    while rest:
        tensor = rest.pop()
        if id(tensor) in seen or tensor.layout is not torch.strided:
            continue
        seen.add(id(tensor))
        with suppress(Exception):  # a wrapper has no storage
            key = tensor.untyped_storage()._cdata
            if key in alive:
                found.setdefault(key, []).append(tensor)
                if tensor._base is not None:
                    rest.append(tensor._base)
    return found


def _computed(tensors: list[torch.Tensor], record: StorageRecord) -> bool:
    """Whether these, all over one storage, have the values now that they stand for."""
    later, nbytes = record.later, tensors[0].untyped_storage().nbytes()
    if later is None or record.guess:
        return False
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes(), of_any_size():
            value = later.value({})
            whole = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
            HollowStorages.tensor(whole, *later.layout).copy_(value)
            for tensor in tensors:
                layout = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                tensor.data = HollowStorages.tensor(whole, *layout)
    except (TooLarge, RuntimeError):
        return False
    return True


def _holders(thing: Any, ours: Sequence[Any]) -> list[Any]:
    """What refers to `thing`, but for frames that run and lists of this file's own."""
    found = gc.get_referrers(thing)
    return [each for each in found if not isinstance(each, types.FrameType) and not any(each is own for own in ours)]


def _refuse(tensor: torch.Tensor, ours: Sequence[Any]) -> None:
    keeper = tensor if is_from_before(tensor) else _keeper(tensor, ours)
    if keeper is not None:
        raise ConfigError(
            f"the step keeps a tensor of {tuple(tensor.shape)} that was only simulated in a {type(keeper).__name__}, "
            "from which it cannot be taken out again: the next real step would compute with it. Keep it in an "
            "attribute of a module, or in a dict or list that the code names"
        )


def _keeper(thing: Any, ours: Sequence[Any], depth: int = 0) -> Any:
    """What was there before the simulation and has `thing` now; None if only what is running has it."""
    holders = _holders(thing, ours) if depth < _DEEPEST else []
    for holder in holders:
        if not isinstance(holder, torch.Tensor):
            found = holder if is_from_before(holder) else _keeper(holder, [*ours, holders], depth + 1)
            if found is not None:
                return found
    return None


def _taken_out(
    thing: Any, ours: Sequence[Any], *, attributes: bool, depth: int = 0, visited: set[int] | None = None
) -> bool:
    """Whether nobody has `thing` any more: of `attributes` that have it only if they may be None."""
    visited = set() if visited is None else visited
    if id(thing) in visited:  # a cycle, or a second way up to it
        return True
    visited.add(id(thing))
    done = True
    holders = _holders(thing, ours)
    for holder in holders:
        done &= _let_go(holder, thing, [*ours, holders], attributes=attributes, depth=depth, visited=visited)
    return done


def _let_go(holder: Any, thing: Any, ours: Sequence[Any], *, attributes: bool, depth: int, visited: set[int]) -> bool:
    if depth > _DEEPEST or isinstance(holder, torch.Tensor):  # a view's base goes with the view
        return True
    if isinstance(holder, _Cached):
        holder.cache_clear()
        return True
    if isinstance(holder, dict):
        return _out_of_dict(holder, thing, ours, attributes=attributes, depth=depth, visited=visited)
    if isinstance(holder, (list, deque, set)) and is_from_before(holder):
        kept = [each for each in holder if each is not thing]
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(kept)
        return True
    if isinstance(holder, types.CellType) and is_from_before(holder):
        if attributes:
            holder.cell_contents = None
        return attributes
    if is_from_before(holder) and (names := [*_names_of(holder, thing)]):
        for name in names if attributes else ():
            with suppress(Exception):
                setattr(holder, name, None)
        return attributes
    # What the step has made goes as a whole: a tuple, an object, a function with what it closes over.
    return _taken_out(holder, ours, attributes=attributes, depth=depth + 1, visited=visited)


def _out_of_dict(
    table: dict[Any, Any],
    thing: Any,
    ours: Sequence[Any],
    *,
    attributes: bool,
    depth: int,
    visited: set[int],
) -> bool:
    owners = [each for each in _holders(table, ours) if _has_as_attributes(each, table, thing)]
    if not owners:
        # One from before that held no objects until now looks as new as one that the step has made.
        for key in [key for key, value in table.items() if value is thing or key is thing]:
            del table[key]
        return True
    owner = owners[0]
    if not isinstance(owner, (types.ModuleType, type)) and not is_from_before(owner):
        return _taken_out(owner, [*ours, owners], attributes=attributes, depth=depth + 1, visited=visited)
    if attributes:
        for name in _names_of(owner, thing):
            setattr(owner, name, None)
    return attributes


def _has_as_attributes(owner: Any, table: dict[Any, Any], thing: Any) -> bool:
    if isinstance(owner, type):
        return any(value is thing for value in vars(owner).values())
    return getattr(owner, "__dict__", None) is table


def _names_of(owner: Any, thing: Any) -> Iterator[str]:
    """The attributes of `owner` that are `thing`."""
    with suppress(TypeError):
        yield from [name for name, value in vars(owner).items() if value is thing]
    for cls in type(owner).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if getattr(owner, name, None) is thing:
                yield name
