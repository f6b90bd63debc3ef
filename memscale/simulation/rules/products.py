"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from memscale.simulation.rules.rule import (
    RESULTS,
    Arguments,
    CardTraits,
    Flops,
    OpRule,
    Program,
    product,
    share,
    taken,
)


def _copies(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a copy of each matrix without a dense dimension.

    Source: ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas`` in aten/src/ATen/native/cuda/Blas.cpp.
    """
    copies = []
    for matrix in args[-2:]:
        rows, columns = matrix.shape[-2:]
        down, across = matrix.stride()[-2:]
        dense = (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns))
        copies.append(0 if dense or not matrix.numel() else matrix.numel() * matrix.itemsize)
    return RESULTS, *taken(*copies)


def _always(args: Sequence[Any], card: CardTraits) -> bool:
    return True


def _flops(left: str) -> Flops:
    """Returns the formula of a product whose results sum over the last dimension of the argument `left`."""

    def formula(given: Arguments, results: Any) -> int:
        return int(2 * prod(results.shape) * given[left].shape[-1])

    return formula


def _flops_of_batch_sum(given: Arguments, results: Any) -> int:
    return int(2 * prod(given["batch1"].shape) * given["batch2"].shape[-1])


def _flops_of_groups(given: Arguments, results: Any) -> int:
    """Returns the FLOPs of separate products of groups, which split rows, columns or the summed dimension."""
    left, right = given["self"], given["mat2"]
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1
    return int(2 * prod(left.shape) // groups * right.shape[-1])


def _rules(left: str, *names: str, **more: Any) -> dict[str, OpRule]:
    """Returns the rules of products whose results sum over the last dimension of the argument `left`."""
    return {f"aten.{name}": OpRule(flops=_flops(left), **more) for name in names}


def _dense(left: int) -> dict[str, Any]:
    """Returns the facts about a product of the matrices number `left` and ``left + 1``."""
    return {"program": _copies, "time": product(left), "uses_cublas": _always, "rows": left}


RULES = {
    **_rules("self", "mm.default", "bmm.default", **_dense(0)),
    **_rules("mat1", "addmm.default", **_dense(1)),
    **_rules("batch1", "baddbmm.default", **_dense(1)),
    **_rules("self", "mm", "bmm", "mv", "dot", "_scaled_mm", uses_cublas=_always),
    **_rules("mat1", "addmm", uses_cublas=_always),
    **_rules("batch1", "baddbmm", uses_cublas=_always),
    **_rules("mat", "addmv", uses_cublas=_always),
    **_rules("self", "vdot", "_int_mm", "_scaled_mm_v2"),
    **_rules("mat1", "addmm_", "_addmm_activation"),
    **_rules("batch1", "baddbmm_"),
    **_rules("mat", "addmv_"),
    **_rules("input", "linear"),
    **{f"aten.{name}": OpRule(flops=_flops_of_batch_sum) for name in ("addbmm", "addbmm_")},
    # The real kernel takes more dtypes than the fake one; on zeros it would take minutes for a mixture of experts.
    "aten._grouped_mm": OpRule(flops=_flops_of_groups, faked_in=torch.bfloat16, time=share(0.7, 0.7)),
    **{f"aten.{name}": OpRule(flops=_flops_of_groups) for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2")},
}
