"""Detects operations that make a region unfit for computation in pieces of its rows.

The first piece of a region's first call runs under a dispatch mode that sees every operator before it executes, so that
a refusal comes before any change. The mode follows the dimension of the rows through the operators that have a rule in
`row_rules`, and refuses those that couple rows for certain (`coupling`). Coupling by other operators is not
detected here; `memscale.verify` compares numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from memscale.core import TransformError, internals, pytrees
from memscale.regions import (
    Captures,
    OperatorWatch,
    is_unrecorded,
    memory_of,
    storages,
    takes_batch_statistics,
    unrecorded,
)
from memscale.transforms.tile.coupling import (
    SomeRows,
    are_in_order,
    couples,
    is_row_view,
    passes_on,
    reduces,
    rows_of_view,
)
from memscale.transforms.tile.numbers import arguments_of
from memscale.transforms.tile.row_rules import RowCall, RowDim, rule_of
from memscale.transforms.tile.unfit_regions import BATCH_NORM


class _OverRows:
    """The place of the rows in a tensor that was computed over all rows of the piece, such as their mean: none."""


_OVER_ROWS = _OverRows()
_Place = RowDim | SomeRows | _OverRows


class _Places:
    """Maps strided tensors to the places of their rows, by memory and layout: autograd makes new objects for a view."""

    def __init__(self) -> None:
        # By storages, weakly: a new storage may get the address of an old one.
        self._known: WeakKeyDictionary[Any, dict[Any, _Place]] = WeakKeyDictionary()

    def note(self, tensor: torch.Tensor, place: _Place | None) -> None:
        if tensor.layout is not torch.strided:  # a sparse tensor has no storage, and its `==` is no bool
            return
        [storage] = storages([tensor])
        if place is None:
            self._known.get(storage, {}).pop(_layout(tensor), None)
        else:
            self._known.setdefault(storage, {})[_layout(tensor)] = place

    def find(self, tensor: Any) -> _Place | None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        [storage] = storages([tensor])
        return self._known.get(storage, {}).get(_layout(tensor))

    def is_part(self, tensor: Any) -> bool:
        """Whether `tensor` is some rows of a tensor that holds them all, as ``x[0]`` is."""
        if not isinstance(self.find(tensor), SomeRows):
            return False
        return any(isinstance(place, RowDim) for place in self._known[storages([tensor])[0]].values())

    def rows(self, tensor: Any) -> RowDim | None:
        place = self.find(tensor)
        return place if isinstance(place, RowDim) else None


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


class RowwiseWatch(OperatorWatch):
    """Raises `TransformError` at an operator that couples rows, or whose effect depends on how often it runs."""

    def __init__(
        self, captures: Captures, whole: list[torch.Tensor], rows: Mapping[torch.Tensor, int], what: str
    ) -> None:
        """Watches a run on `rows`, pieces with their cut dimension, and `whole`, tensors that each piece gets."""
        super().__init__()
        self._what = what
        self._pieces = rows
        shared = [*((repr(str(key)), tensor) for _, key, tensor in captures.tensors)]
        shared += [(f"an argument of shape {list(tensor.shape)} that is passed whole", tensor) for tensor in whole]
        self._shared = {
            memory_of(tensor): name
            for name, tensor in shared
            # An operand of torch.func is left out: torch.func itself refuses in-place changes of it.
            if not internals.functorch.is_functorch_wrapped_tensor(tensor)
        }
        # The memory of integers among them and of the rows, and of all that is computed from either.
        self._integers = WeakSet(storages([tensor for _, tensor in shared if _is_integer(tensor)]))
        self._of_rows = WeakSet(storages(list(rows)))
        self._count = next(tensor.shape[dim] for tensor, dim in rows.items())
        self._places = _Places()
        self._numbers = _Places()  # of the numbers of the rows, such as torch.arange(len(x)), and what is made of them
        with unrecorded():
            for tensor, dim in rows.items():
                seen = _unwrapped(tensor)
                # vmap's wrapper hides a dimension.
                if seen.dim() == tensor.dim() and RowDim(dim).holds(seen, self._count):
                    self._places.note(seen, RowDim(dim))

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, internals.OpOverload):
            raise TransformError(
                f"{self._what}: the region calls {func}, an operator of higher order (as torch.cond and flex_attention "
                "are), and whether what this operator runs treats each row by itself cannot be watched; tile a part of "
                "the region without it, or use checkpoint() for this region"
            )
        if is_unrecorded():
            return func(*args, **kwargs)
        if takes_batch_statistics(func, args, kwargs):
            raise TransformError(BATCH_NORM.format(what=self._what, func=func))
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
            for argument in arguments:
                if argument.is_write:
                    for tensor in pytrees.tensors(given.get(argument.name)):  # a list, in the `_foreach` operators
                        self._refuse_shared(tensor)
                        self._refuse_some_rows(tensor)
        if self._integers and _takes_index(func):
            self._refuse_index(arguments_of(func, args, kwargs))
        result = self._followed(func, args, kwargs)
        if self._integers:
            sources = storages(pytrees.tensors((args, kwargs)))
            made = [each for each in pytrees.tensors(result) if each.layout is torch.strided]  # others have no storage
            if any(each in self._of_rows for each in sources):
                self._of_rows.update(storages(made))
            if any(each in self._integers for each in sources):
                self._integers.update(storages(list(filter(_is_integer, made))))
        return result

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator and notes where its results have the rows.

        Raises:
            TransformError: the operator couples rows, before it runs.
        """
        tensors = pytrees.tensors((args, kwargs))
        places = {place for each in tensors if (place := self._places.find(each)) is not None}
        if places and torch.Tag.pointwise in func.tags:
            self._refuse_numbers(func, tensors)
        if not places:
            return self._numbered(func, tensors, args, kwargs)
        call = RowCall(arguments_of(func, args, kwargs), None, self._count, self._places.rows)
        over_rows = places == {_OVER_ROWS}
        if _OVER_ROWS in places and not over_rows and passes_on(func):
            raise TransformError(
                f"{self._what}: the region uses a number that it computes over its rows, such as a mean or a maximum, "
                f"in the rows again ({func}). {_COUPLED}"
            )
        if any(isinstance(place, SomeRows) for place in places):
            return self._followed_by_number(func, call, places, args, kwargs)
        if not over_rows and couples(func, call):
            raise TransformError(f"{self._what}: {func} works along the dimension that is cut into pieces. {_COUPLED}")
        reduced = not over_rows and reduces(func, call)
        result = func(*args, **kwargs)
        call = dataclasses.replace(call, result=result)
        results = pytrees.tensors(result)
        found: Any = None
        if reduced or (over_rows and passes_on(func)):
            found = _OVER_ROWS
        elif not over_rows and is_row_view(func, call):
            found = tuple(rows_of_view(call, each) for each in results)
        elif not over_rows and (rule := rule_of(func)) is not None:
            found = rule(call)
        for tensor, place in zip(results, found if isinstance(found, tuple) else [found] * len(results), strict=False):
            has_rows = not isinstance(place, RowDim) or place.holds(tensor, self._count)
            self._places.note(tensor, place if has_rows else None)
        return result

    def _numbered(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Runs an operator without rows in its arguments, and notes a result that holds the numbers of the rows."""
        result = func(*args, **kwargs)
        if func._schema.name in _NUMBERING and result.shape == (self._count,) and self._count > 1:
            self._numbers.note(result, RowDim(0))
        elif any(map(self._numbers.rows, tensors)) and (rule := rule_of(func)) is not None:
            found = rule(RowCall(arguments_of(func, args, kwargs), result, self._count, self._numbers.rows))
            if isinstance(found, RowDim) and isinstance(result, torch.Tensor) and found.holds(result, self._count):
                self._numbers.note(result, found)
        return result

    def _refuse_numbers(self, func: Any, tensors: list[torch.Tensor]) -> None:
        # Integers may be numbers of rows: an index of each row's own entries, in a piece as in the whole.
        behind = {rows.dim - each.dim() for each in tensors if (rows := self._numbers.rows(each)) is not None}
        for each in tensors if behind else ():
            if not _is_integer(each) and (rows := self._places.rows(each)) and rows.dim - each.dim() in behind:
                raise TransformError(
                    f"{self._what}: the region computes with the numbers of its rows, such as torch.arange(len(x)) "
                    f"({func}). {_COUPLED}"
                )

    def _followed_by_number(self, func: Any, call: RowCall, places: set[_Place], args: Any, kwargs: Any) -> Any:
        """Runs an operator on some of the rows; `places` are those of all tensors that have one."""
        if len(places) > 1 and passes_on(func):
            joined = call.given.get("tensors")
            if joined is None or not are_in_order(list(map(self._places.find, joined)), self._count):
                raise TransformError(
                    f"{self._what}: the region takes rows by their number, such as x[:1] or a loop over time, and "
                    f"computes with others ({func}). {_COUPLED}"
                )
        written = {each.name for each in func._schema.arguments if each.is_write}
        changed = [value for name, value in call.given.items() if name in written and self._places.is_part(value)]
        given = [value for name, value in call.given.items() if name not in written]
        if changed and not any(isinstance(self._places.find(each), SomeRows) for each in pytrees.tensors(given)):
            raise TransformError(f"{self._what}: the region changes rows by their number, as x[0] = 0 does. {_COUPLED}")
        result = func(*args, **kwargs)
        for tensor in pytrees.tensors(result):
            only = len(places) == 1 and passes_on(func) and tensor.numel() > 1
            self._places.note(tensor, next(iter(places)) if only else None)
        return result

    def refuse_over_rows(self, result: Any) -> None:
        """Raises `TransformError` if an output was computed over the rows, and is as long as they are."""
        for each in pytrees.tensors(result):
            with unrecorded():
                place = self._places.find(_unwrapped(each))
            if place is _OVER_ROWS and self._count in each.shape:
                raise TransformError(
                    f"{self._what}: an output of shape {list(each.shape)} is computed over the rows. {_COUPLED}"
                )

    def _refuse_index(self, given: Mapping[str, Any]) -> None:
        indexed = given["self"]
        if "dim" in given:
            by_dim = {given["dim"] % max(indexed.dim(), 1): given["index"]}
        else:
            by_dim = dict(enumerate(given["indices"]))
        [memory] = storages([indexed])
        for piece, dim in self._pieces.items():
            index = by_dim.get(dim)
            if (
                index is not None
                and storages([index])[0] in self._integers
                and memory in self._of_rows
                and indexed.shape[dim] == piece.shape[dim]
            ):
                raise TransformError(
                    f"{self._what}: the region picks rows by an index of shape {list(index.shape)} that is the same "
                    "for every piece, and a piece has only some of the rows (a graph's edges point to all nodes); "
                    "tile a part of it that computes each row by itself, or use checkpoint()"
                )

    def _refuse_shared(self, tensor: torch.Tensor) -> None:
        name = self._shared.get(memory_of(tensor))
        if name is not None:
            raise TransformError(
                f"{self._what} would update {name} once for every piece, because the region changes it in place "
                "while it runs; use checkpoint() for this region"
            )

    def _refuse_some_rows(self, tensor: torch.Tensor) -> None:
        for piece, dim in self._pieces.items():
            if memory_of(tensor) != memory_of(piece) or piece.layout is not torch.strided:
                continue
            rows, step = piece.shape[dim], piece.stride(dim)
            spans = [(size * stride, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
            if rows > 1 and not any(span == rows * step and step % stride == 0 for span, stride in spans if stride):
                raise TransformError(
                    f"{self._what}: the region changes some rows of an argument of shape {list(piece.shape)} in place, "
                    "and would change those of every piece; use checkpoint() for this region, or write out of place"
                )


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrappers of torch.func, which operators get."""
    while internals.functorch.is_functorch_wrapped_tensor(tensor):
        tensor = internals.functorch.get_unwrapped(tensor)
    return tensor


_NUMBERING = ("aten::arange", "aten::linspace")
_COUPLED = (
    "Each piece would compute it for its own rows, which gives other numbers than for all rows; cut another dimension, "
    "tile a part of the region that computes each row by itself, or use checkpoint()"
)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


@functools.lru_cache(maxsize=4096)
def _takes_index(func: Any) -> bool:
    """Whether an operator reads or writes positions of `self` along a dimension by a tensor of integers."""
    kinds = {argument.name: str(argument.type) for argument in func._schema.arguments}
    by_dim = kinds.keys() >= {"self", "dim"} and kinds.get("index") == "Tensor"
    return by_dim or ("self" in kinds and kinds.get("indices", "").startswith("List"))
