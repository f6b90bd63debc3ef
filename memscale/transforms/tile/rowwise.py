"""Detects operations that make a region unfit for computation in pieces of its rows.

The first piece of a region's first call runs under a dispatch mode that sees every operator before it executes, so that
a refusal comes before any change. The mode follows the dimension of the rows through the operators that have a rule in
`row_rules`, and refuses those that couple rows for certain (`coupling`). Coupling by other operators is not
detected here; `memscale.verify` compares numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from memscale.core import TransformError, internals, modules_in, pytrees
from memscale.regions import (
    ArgumentSpec,
    Captures,
    OperatorWatch,
    code_names,
    is_unrecorded,
    memory_of,
    read,
    refuse_iterators,
    storages,
    takes_batch_statistics,
)
from memscale.transforms.tile.coupling import SomeRows, are_in_order, couples, passes_on, reduces, taken, takes_rows
from memscale.transforms.tile.numbers import arguments_of
from memscale.transforms.tile.pieces import Take
from memscale.transforms.tile.row_rules import RowCall, RowDim, rule_of

_BATCH_NORM = (
    "{what} would cut the rows over which {func} computes its statistics (BatchNorm in training), and the numbers "
    "would change; use checkpoint() for this region, or put its norms in eval()"
)


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
        self,
        captures: Captures,
        whole: list[torch.Tensor],
        rows: Mapping[torch.Tensor, int],
        what: str,
        *,
        total: int = sys.maxsize,
    ) -> None:
        """Watches a run on `rows`, pieces with their cut dimension, and `whole`, tensors that each piece gets.

        There are `total` rows. Of one row, there is nothing to couple.
        """
        super().__init__()
        self._what = what
        self._total = total
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
            raise TransformError(_BATCH_NORM.format(what=self._what, func=func))
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
        if self._total < 2:
            return func(*args, **kwargs)
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
        elif not over_rows and takes_rows(func, call):
            found = tuple(taken(call, each) for each in results)
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
            if self._places.find(_unwrapped(each)) is _OVER_ROWS and self._count in each.shape:
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


def _modules(parts: list[Any]) -> list[nn.Module]:
    """Returns the modules that `parts` are or consist of, and those below them."""
    return [module for part in parts for root in modules_in(part) for module in root.modules()]


def names(parts: list[Any], name: str) -> bool:
    """Whether user code that `parts` run contains the name `name`."""
    forwards = {type(module).forward for module in _modules(parts) if not type(module).__module__.startswith("torch.")}
    named = [code_names(fn.__code__) for fn in (*forwards, *parts) if isinstance(fn, types.FunctionType)]
    return any(name in each for each in named)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_compiled(parts: list[Any], normalizes: bool, watched: tuple[bool, ...], what: object) -> None:
    """Raises `TransformError` if a region under `torch.compile`, where no mode watches, may be unfit for pieces.

    Args:
        parts: the functions and modules of the region.
        normalizes: whether the region's code names `batch_norm`.
        watched: the modes (whether any module trains) in which a call outside of `torch.compile` was watched.
        what: the transform, converted to text in errors only, because the compiler may keep its numbers dynamic.
    """
    modules = _modules(parts)
    for module in modules:
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None):
            raise TransformError(_BATCH_NORM.format(what=what, func=type(module).__name__))
    training = any(module.training for module in modules)
    if training not in watched and (normalizes or any(len(module._buffers) > 0 for module in modules)):
        raise TransformError(
            f"{what} under torch.compile: the region {'names batch_norm' if normalizes else 'has buffers'}, and only a "
            "call outside of torch.compile can show that pieces may go through it one by one; call it once "
            f"{'in training mode' if training else 'in eval()'} before"
        )


def refuse_stored_tensors(captures: Captures, what: str) -> None:
    """Raises `TransformError` if the region has stored a tensor or module since `captures` was read."""
    for slot, content in zip(captures.slots, captures.contents, strict=True):
        now = read(slot)
        for key, value in now.items() if isinstance(now, dict) else enumerate(now):
            before = content.get(key) if isinstance(content, dict) else dict(enumerate(content)).get(key)
            if isinstance(value, nn.Module) and before is None:
                raise TransformError(
                    f"{what}: the region makes a module, {key!r}, and would make another one for every piece; now that "
                    "it is there, call the region again, or make it before the first call"
                )
            if isinstance(value, torch.Tensor) and value is not before:
                raise TransformError(
                    f"{what}: the region stores a tensor of shape {list(value.shape)} under {key!r}, and of several "
                    "pieces only the last would remain; return it from the region instead, or use checkpoint()"
                )


_OUT_OF_BOUNDS = re.compile(r"index (\d+) is out of bounds for dimension \d+ with size (\d+)")


@contextmanager
def index_explained(what: str, length: int, total: int) -> Iterator[None]:
    """Explains PyTorch's error of an index that is no row of the piece of `length` rows, but one of all `total`."""
    try:
        yield
    except IndexError as error:
        found = _OUT_OF_BOUNDS.search(str(error))
        if found is None or int(found[2]) != length or int(found[1]) >= total:
            raise
        raise TransformError(
            f"{what}: the region picks row {found[1]} of {total} where a piece has {length} ({error}); tile a part of "
            "it that computes each row by itself, or use checkpoint()"
        ) from error


# Autograd's error about an in-place change of a piece or of a view of one. It says the same of the outputs of `split`.
_CHANGED_PIECE = re.compile(rf"Output \d+ of ({Take.__name__}|(?!\w*Split|Unbind)\w+ .* returns multiple views)")


@contextmanager
def refuse_changed_arguments(args: Any, kwargs: Any, what: str) -> Iterator[None]:
    """Raises `TransformError` if the body changes a list, dictionary or object reachable from `args` and `kwargs`.

    It also raises if the body changes in place one of their tensors, or a view of one, that requires a gradient.
    """
    refuse_iterators(pytrees.flatten((args, kwargs))[0])
    given = ArgumentSpec(args, kwargs, None, hold=True)
    before = given.contents()
    try:
        yield
    except RuntimeError as error:
        if not _CHANGED_PIECE.match(str(error)):
            raise
        raise TransformError(
            f"{what}: the region changes an argument in place, or a view of one, and backward would see that of one "
            "piece alone; write out of place, or clone the argument first"
        ) from error
    for (thing, then), (_, now) in zip(before, given.contents(), strict=True):
        if not then.same(now):
            raise TransformError(
                f"{what}: the region changes one of its arguments, a {type(thing).__name__}, and every piece would do "
                "so again; use checkpoint() for this region, or do without (use_cache=False, if it is the cache of a "
                "Hugging Face model)"
            )
