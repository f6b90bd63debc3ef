"""Lists and dictionaries among a region's arguments: the region gets the caller's own objects, so it may write to them.

During the call they hold the converted tensors. Afterwards each holds what the region left in it, with converted
tensors replaced by their originals, and floating tensors that the region made cast to the dtype of its results.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from memscale.core import TransformError, pytrees
from memscale.transforms.cast.precision import cast_floating, is_castable

_Items = list[tuple[Any, Any]]
_LENT = (list, dict, OrderedDict, defaultdict)  # passed themselves; other containers, such as dataclasses, are rebuilt


class Containers:
    """The arguments of one call of a region that computes in another dtype; `convert` casts one tensor."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._convert = convert
        self._lent: list[tuple[Any, _Items, _Items]] = []  # a container, its own items, and its items during the call
        self._made: list[tuple[Any, Any, list[Any]]] = []  # an object, its rebuilt copy, and the leaves of that copy

    def lend(self, tree: Any) -> Any:
        """Returns `tree` with converted tensors, for the region."""
        if isinstance(tree, torch.Tensor):
            return self._convert(tree) if is_castable(tree) else tree
        kind: Any = type(tree)
        if kind in _LENT:
            if not any(thing is tree for thing, _, _ in self._lent):
                before = _items(tree)
                meanwhile: _Items = []
                self._lent.append((tree, before, meanwhile))
                meanwhile.extend([(key, self.lend(value)) for key, value in before])
                if not _same(before, meanwhile):
                    _fill(tree, meanwhile)
            return tree
        if kind is tuple or (isinstance(tree, tuple) and hasattr(kind, "_fields")):
            items = [self.lend(item) for item in tree]
            return kind(items) if kind is tuple else kind(*items)
        if not any(is_castable(leaf) for leaf in pytrees.flatten(tree)[0]):
            return tree
        made = cast_floating(tree, self._convert)
        self._made.append((tree, made, pytrees.flatten(made)[0]))
        return made

    def take_back(self, original: Callable[[Any], Any], outside: torch.dtype | None) -> None:
        """Restores the containers after the run; `original` maps a converted tensor to its original, if it is one."""
        for thing, before, meanwhile in self._lent:
            now = _items(thing)
            if not _same(now, meanwhile):
                _fill(thing, [(key, _back(value, before, meanwhile, original, outside)) for key, value in now])
            elif not _same(now, before):
                _fill(thing, before)

    def refuse_changed_copies(self) -> None:
        """Raises `TransformError` if the region changed an object that was rebuilt for it."""
        for tree, made, leaves in self._made:
            now = pytrees.flatten(made)[0]
            if len(now) != len(leaves) or any(one is not other for one, other in zip(now, leaves, strict=True)):
                raise TransformError(
                    f"a cast region writes into an argument, a {type(tree).__name__}, of which it was given a copy, so "
                    "the change would be lost; let it write into a list or a dictionary, or return the value"
                )


def _back(
    value: Any, before: _Items, meanwhile: _Items, original: Callable[[Any], Any], outside: torch.dtype | None
) -> Any:
    for (_, own), (_, lent) in zip(before, meanwhile, strict=True):
        if value is lent or value is own:
            return own
    if original(value) is not value:
        return original(value)
    if outside is None or not any(is_castable(leaf) and leaf.dtype != outside for leaf in pytrees.flatten(value)[0]):
        return value
    return cast_floating(value, lambda tensor: tensor.to(outside))


def _items(thing: Any) -> _Items:
    return list(thing.items()) if isinstance(thing, dict) else list(enumerate(thing))


def _fill(thing: Any, items: _Items) -> None:
    if isinstance(thing, dict):
        thing.clear()
        thing.update(items)
    else:
        thing[:] = [value for _, value in items]


def _same(ones: _Items, others: _Items) -> bool:
    if len(ones) != len(others):
        return False
    return all(a is b and (x is y or x == y) for (x, a), (y, b) in zip(ones, others, strict=True))
