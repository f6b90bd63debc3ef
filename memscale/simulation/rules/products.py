"""Matrix products, and their compositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memscale.simulation.rules.rule import RESULTS, CardTraits, OpRule, Program, taken
from memscale.simulation.rules.times import half_of_result, product, share


def _product(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
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


def _dense(left: int) -> OpRule:
    """Returns the rule of a matrix product of the arguments number `left` and ``left + 1``."""
    return OpRule(program=_product, time=product(left), extra=half_of_result(left), uses_cublas=_always, rows=left)


_LIBRARY = OpRule(uses_cublas=_always)

RULES = {
    **{f"aten.{name}.default": _dense(0) for name in ("mm", "bmm")},
    **{f"aten.{name}.default": _dense(1) for name in ("addmm", "baddbmm")},
    **{f"aten.{name}": _LIBRARY for name in ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "addmv", "mv", "dot")},
    # The real kernel takes more dtypes than the fake one; on zeros it would take minutes for a mixture of experts.
    "aten._grouped_mm": OpRule(faked_in=torch.bfloat16, time=share(0.7, 0.7)),
    "aten._trilinear": OpRule(composed_on=("cuda",)),
    "aten._euclidean_dist": OpRule(composed_on=("cuda",)),
    "aten.linalg_pinv.atol_rtol_tensor": OpRule(composed_on=("cuda",)),
}
