"""Compares a piece of rows with its two halves: a function that treats each row by itself gives the same numbers.

The watch of operators does not see what Python makes of the number of rows (`x / len(x)`), and it lets operators pass
that couple rows in some functions only (`gather`). The numbers of two sizes show these, unless few rows differ, or none
of this batch (a branch on `any()` of the data).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale.core import TransformError, internals, pytrees, simulating, versions
from memscale.regions import Captures, Environment, accelerators, dispatch_modes, functorch_state, unrecorded
from memscale.transforms.tile.cutting import Cut, Cutting, Joined
from memscale.transforms.tile.head.linear import no_casts_kept

# A row has other numbers if they differ by more than this share of its norm, and by more than so many times the
# precision of its dtype. By choice, between two differences: inputs that are rounded otherwise change the rows of 48
# layers in bfloat16 by 2 % of their norms, and `x / len(x)` doubles those of a half.
_SHARE, _PRECISIONS = 0.25, 16
_ROWS, _COLUMNS = 64, 4096  # compared at most, by choice
_DETACHED = torch.Tensor.detach, torch.Tensor.detach  # hooks that keep each tensor as it is


def may_compare() -> bool:
    """Whether a comparison may run here: not under `torch.func`, nor under a caller's mode, such as a FLOP counter."""
    return not functorch_state.active() and all(
        type(mode).__module__.startswith("memscale.") for mode in dispatch_modes()
    )


class Halves:
    """The comparison of one piece, made before the piece runs.

    Args:
        fn: the region's function.
        how: the transform.
        cut: the cut of the call.
        captures: the captures of `fn`, with the state of the call's beginning.
        leaves: the arguments of the piece, flattened.
    """

    def __init__(self, fn: Any, how: Cutting, cut: Cut, captures: Captures, leaves: Sequence[Any]) -> None:
        self._fn, self._how, self._cut, self._captures, self._leaves = fn, how, cut, captures, leaves
        self._tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        self._versions = versions(self._tensors)
        self._environment = Environment(accelerators(self._tensors), host_random=True, generators=captures.generators)

    def compare(self, result: Any) -> None:
        """Runs the halves of the piece whose output is `result`, unless the piece drew random numbers or changed rows.

        Raises:
            TransformError: the halves give other numbers, or outputs of another structure or shape.
        """
        if self._environment.has_drawn() or versions(self._tensors) != self._versions:
            return
        first, cut_dim = next(iter(self._cut.dims.items()))
        length = self._leaves[first].shape[cut_dim]
        if length // 2 == 1 and self._convolves_on_a_cpu():
            return
        joined, (leaves, spec) = Joined(self._how, length, in_place=False), pytrees.flatten(result)
        joined.add(result, 0, length)  # refuses what cannot be joined in any case
        halves: list[list[Any]] = []
        for start, end in ((0, length // 2), (length // 2, length)):
            try:
                # In the present grad mode, on which code may depend; hooks around the region see no tensor of this run.
                with unrecorded(), self._environment.reinstate(), no_casts_kept(), saved_tensors_hooks(*_DETACHED):
                    self._captures.restore()  # the first piece has run
                    args, kwargs = self._part(start, end - start)
                    output = pytrees.map_only(torch.Tensor, torch.Tensor.detach, self._fn(*args, **kwargs))
            except Exception:  # a function that fails on half of the rows is not compared
                return
            finally:
                self._captures.restore()
            found, other = pytrees.flatten(output)
            if other != spec:
                raise TransformError(f"{self._how!r}: the pieces return different structures{_COUPLED}")
            halves.append(found)
        dims, weight = joined.dims(result, leaves, length), length // 2 / length
        for index, (leaf, one, other) in enumerate(zip(leaves, *halves, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) in (int, float, bool, str) and not leaf == one == other:
                    raise TransformError(
                        f"{self._how!r}: an output of type {type(leaf).__name__} differs between pieces ({leaf!r} for "
                        f"{length} rows){_COUPLED}"
                    )
                continue
            dim = dims.get(index)
            pairs = _pairs(leaf, one, other, dim, weight if self._how.reduce == "mean" else None)
            if pairs is None:
                raise TransformError(
                    f"{self._how!r}: output {index} of a piece is {_spelled(leaf)} and that of its half "
                    f"{_spelled(one)}{_COUPLED}"
                )
            if any(_differ(half, expected, dim) for half, expected in pairs):
                raise TransformError(
                    f"{self._how!r}: output {index} of a piece of {length} rows has other numbers than its two halves "
                    f"give{_COUPLED}"
                )

    def _convolves_on_a_cpu(self) -> bool:
        """Whether a CPU convolves, whose kernel for a single row may allocate many times what the piece takes."""
        kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d
        return not accelerators(self._tensors) and any(isinstance(each, kinds) for each in self._captures.modules)

    def _part(self, start: int, length: int) -> tuple[Any, Any]:
        leaves = list(self._leaves)
        for index, dim in self._cut.dims.items():
            leaves[index] = leaves[index].narrow(dim, start, length)
        args, kwargs = pytrees.unflatten(self._cut.spec, leaves)
        return args, kwargs


_COUPLED = (
    ", so the region couples the rows or computes with their number (len(x), a mean over the batch); tile a part of it "
    "that computes each row by itself, give reduce='mean' for a mean over rows, or use checkpoint() for this region"
)


def _spelled(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _pairs(
    leaf: torch.Tensor, one: torch.Tensor, other: torch.Tensor, dim: int | None, weight: float | None
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns the pairs of tensors that must have equal numbers; None if the shapes of the halves do not fit.

    Args:
        leaf: an output of the piece.
        one, other: that of its halves.
        dim: the dimension along which the outputs are joined; None for an output that is reduced.
        weight: the share of the first half in a mean; None for a sum.
    """
    if dim is None:
        if not one.shape == other.shape == leaf.shape:
            return None
        return [(one + other if weight is None else weight * one + (1 - weight) * other, leaf)]
    if not one.dim() == other.dim() == leaf.dim() or one.shape[dim] + other.shape[dim] != leaf.shape[dim]:
        return None
    expected = leaf.detach().split([one.shape[dim], other.shape[dim]], dim)
    pairs = list(zip((one, other), expected, strict=True))
    return pairs if all(half.shape == each.shape for half, each in pairs) else None


def _differ(one: torch.Tensor, other: torch.Tensor, dim: int | None) -> bool:
    """Whether most rows of two outputs have other numbers; `dim` is that of the rows, None for an output without.

    Some rows and columns stand for all, so that the comparison takes little memory.
    """
    with unrecorded(), torch.no_grad():
        one, other = _sample(one, dim), _sample(other, dim).to(one.dtype)
        if one.is_floating_point() or one.is_complex():
            norms, apart = other.norm(dim=1), (one - other).norm(dim=1)
            least = _PRECISIONS * torch.finfo(one.dtype).eps * one.shape[1] ** 0.5
            differs = apart > (_SHARE * norms).clamp(min=least)
        else:
            differs = one != other
    if simulating() or differs.is_meta or isinstance(differs, internals.FakeTensor) or not differs.numel():
        return False
    return bool(2 * int(differs.sum()) > differs.numel())


def _sample(output: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Returns at most `_ROWS` rows and `_COLUMNS` columns of `output`, spread evenly, as a matrix."""
    rows = output.detach()[None] if dim is None else output.detach().movedim(dim, 0)
    rows = rows[:: 1 + len(rows) // _ROWS]
    rows = rows.reshape(len(rows), -1)
    return rows[:, :: 1 + rows.shape[1] // _COLUMNS]
