"""Proves that a region's rows are independent, by following the dimension of the rows through each operator.

`rowwise` refuses operators that couple rows. A planner that tiles regions on its own needs a proof instead: each
operator must have a rule for its rows. The region may also compute with its number of rows, so the region runs twice,
with all rows and with one row less, and both runs must call the same operators.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import TransformError, internals, pytrees
from memscale.regions import Captures, is_unrecorded
from memscale.transforms.tile.cutting import Cut, Joined
from memscale.transforms.tile.numbers import arguments_of, spelled
from memscale.transforms.tile.row_rules import RowCall, RowDim, draws, is_known, rule_of
from memscale.transforms.tile.rowwise import RowwiseWatch
from memscale.transforms.tile.unfit_regions import names

#: Each of the two runs needs two rows: with one row, a view does not show which dimension of size 1 holds the rows.
FEWEST_ROWS = 3


_EXPANDED = torch.ops.aten.expand.default
# Operators that fill a tensor with one number, which `spelled` spells out, or repeat a tensor without rows.
_FILLED = frozenset(getattr(torch.ops.aten, name).default for name in ("zeros", "ones", "full", "expand"))


class _Local(threading.local):
    wanted = False


_local = _Local()


@contextmanager
def proven_rows() -> Iterator[None]:
    """Within the body, regions of `tile` run whole instead of in pieces, and must have provably independent rows.

    Raises:
        TransformError: in a call, if an operator couples rows or has no rule, or if the computation depends on the
            number of rows.
    """
    before, _local.wanted = _local.wanted, True
    try:
        yield
    finally:
        _local.wanted = before


def may_be_proven(operators: Collection[str]) -> bool:
    """Whether there are rules for all of these operators, named as in ``aten::add.Tensor``."""
    return all(map(is_known, operators))


def is_wanted() -> bool:
    """Whether `tile` is to prove rows independent instead of cutting them."""
    return _local.wanted


class IndependenceWatch(RowwiseWatch):
    """Raises `TransformError` at an operator that is not known to compute each row by itself.

    Attributes:
        calls: the operators that ran, with their arguments, as text that does not contain the number of rows.
        filled: the dimension of the rows, or None, in the result of each operator of `_FILLED`.
    """

    def __init__(
        self,
        captures: Captures,
        whole: list[torch.Tensor],
        rows: Mapping[torch.Tensor, int],
        what: str,
        filled: Iterable[int | None],
    ) -> None:
        super().__init__(captures, whole, rows, what)
        self.calls: list[str] = []
        self.filled: list[int | None] = []
        self._filled_before = iter(filled)

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_unrecorded() or not isinstance(func, internals.OpOverload):
            return super().on_call(func, args, kwargs)
        given = arguments_of(func, args, kwargs)
        rule = rule_of(func)
        before = self._places.rows(given.get("self"))
        if not any(map(self._places.rows, pytrees.tensors((args, kwargs)))):
            if rule is None and draws(func):
                raise self._unproven(func)
            result = super().on_call(func, args, kwargs)
            at = self._rows_of_filled(func, result) if func in _FILLED else None
            if at is not None:
                filled = RowDim(at)
                self._places.note(result, filled)
                self.calls.append(f"{spelled(func, given)} {_rows_and_sizes(result, filled)}")
                return result
            self.calls.append(f"{spelled(func, given)} {[list(each.shape) for each in pytrees.tensors(result)]}")
            return result
        written = [
            each
            for argument in func._schema.arguments
            if argument.is_write
            for each in pytrees.tensors(given.get(argument.name))
        ]
        if rule is None or not all(map(self._places.rows, pytrees.tensors(written))):
            raise self._unproven(func)
        result = super().on_call(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags and before is not None:
            self._places.note(given["self"], before)  # the same tensor, with another shape
        found = rule(RowCall(given, result, self._count, self._places.rows))
        if found is None:
            raise self._unproven(func)
        self.calls.append(spelled(func, given))
        tensors = pytrees.tensors(result)
        places = found if isinstance(found, tuple) else [found] * len(tensors)
        for number, (tensor, place) in enumerate(zip(tensors, places, strict=False)):
            if place is None:
                continue
            has_rows = place.holds(tensor, self._count)
            if number == 0 and not has_rows:
                raise self._unproven(func)
            if has_rows:
                self._places.note(tensor, place)
            self.calls.append(_rows_and_sizes(tensor, place))
        return result

    def _rows_of_filled(self, func: Any, result: torch.Tensor) -> int | None:
        """Returns the dimension of the rows in a tensor that holds one number, or one tensor repeated; or None.

        Recurrent states begin as zeros with one entry per row, and learned queries as a parameter that is expanded to
        as many rows. A length that equals the number of rows by chance differs between the two runs, which then differ.
        Where several do (a state as wide as the batch is long), the run with another number of rows tells which.
        """
        found = [
            dim
            for dim, size in enumerate(result.shape)
            if size == self._count and (func is not _EXPANDED or result.stride(dim) == 0)
        ]
        before = next(self._filled_before, None)
        at = before if before in found else found[0] if len(found) == 1 else None
        self.filled.append(at)
        return at

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)  # `on_call` proves each result

    def check(self, outputs: Any, dims: Mapping[int, int], before: Collection[Any]) -> None:
        """Raises `TransformError` if an output does not hold the rows, in order, along the dimension in `dims`.

        It also raises if the graph since the nodes `before` has a backward written in Python, which may couple rows.
        """
        for number, tensor in enumerate(pytrees.flatten(outputs)[0]):
            if not isinstance(tensor, torch.Tensor):
                continue
            if number not in dims or self._places.rows(tensor) != RowDim(dims[number]):
                raise TransformError(
                    f"{self._what}: an output of shape {list(tensor.shape)} is not known to be made of the rows"
                )
            for node in _nodes(tensor.grad_fn, before):
                if isinstance(node, torch.autograd.function.BackwardCFunction) and not hasattr(node, "stands_in"):
                    raise TransformError(
                        f"{self._what}: {type(node).__name__}, a backward written in Python, is not known to compute "
                        "each row by itself"
                    )

    def _unproven(self, func: Any) -> TransformError:
        return TransformError(f"{self._what}: {func} is not known to compute each row by itself")


def prove(run: Callable[..., Any], parts: list[Any], captures: Captures, cut: Cut, joined: Joined, what: str) -> Any:
    """Runs a region on all of its rows, and proves that they are independent.

    Args:
        run: the region.
        parts: the functions and modules of the region.
        captures: the tensors and modules that the region reaches.
        cut: the arguments of the region, and the dimension of the rows in each.
        joined: the join of the outputs of pieces.
        what: the transform that would cut the region, for messages.

    Returns:
        The region's result.

    Raises:
        TransformError: an operator couples rows or has no rule, the computation depends on the number of rows, or there
            are fewer than `FEWEST_ROWS`.
    """
    leaves, total = cut.leaves, cut.total
    if total < FEWEST_ROWS:
        raise TransformError(f"{what}: {total} rows are too few to show that they are independent")
    if names(parts, "register_hook"):
        raise TransformError(f"{what}: a hook on a gradient is not known to compute each row by itself")
    whole = [leaf for at, leaf in enumerate(leaves) if at not in cut.dims and isinstance(leaf, torch.Tensor)]
    calls: list[list[str]] = []
    filled: list[int | None] = []
    for count in (total - 1, total):
        captures.restore()
        # Contiguous copies, because some operators branch on contiguity.
        given = list(leaves)
        for at, dim in cut.dims.items():
            given[at] = leaves[at].narrow(dim, 0, count).clone(memory_format=torch.contiguous_format)
        args, kwargs = pytrees.unflatten(cut.spec, given)
        rows = {given[at]: dim for at, dim in cut.dims.items()}
        with IndependenceWatch(captures, whole, rows, what, filled) as watch:
            result = run(*args, **kwargs)
        filled = watch.filled
        dims = joined.dims(result, pytrees.flatten(result)[0], count)
        watch.check(result, dims, {each.grad_fn for each in given if isinstance(each, torch.Tensor)})
        calls.append(watch.calls)
    for one, other in itertools.zip_longest(*calls, fillvalue="nothing"):
        if one != other:
            raise TransformError(f"{what}: what is computed depends on how many rows there are ({one}; {other})")
    return result


def _rows_and_sizes(tensor: torch.Tensor, place: RowDim) -> str:
    """Returns as text the place of the rows in `tensor` and the sizes of the other dimensions."""
    return f"{place} {[size for dim, size in enumerate(tensor.shape) if dim != place.dim]}"


def _nodes(root: Any, before: Collection[Any]) -> Iterator[Any]:
    """Yields the nodes of an autograd graph that are newer than those in `before`."""
    seen, waiting = {None, *before}, [root]
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions]
