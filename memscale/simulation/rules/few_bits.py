"""The operators of bitsandbytes for layers with quantized weights.

Source: bitsandbytes 0.50.2, ``backends/cuda/ops.py`` and ``backends/default/ops.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memscale.simulation.rules.rule import RESULTS, CardTraits, OpRule, Program


def _rows_in_8_bits(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of magnitudes, the outliers among them, and a flag for outliers."""
    rows, threshold = args[0], args[1] if len(args) > 1 else 0.0
    if not threshold:
        return (RESULTS,)
    return RESULTS, rows.nbytes, rows.numel(), -rows.nbytes, 1, -1


def _sums_as_floats(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a kernel that writes float16, which a cast converts to another dtype."""
    sums, dtype = args[0], args[3] if len(args) > 3 else None
    return (RESULTS,) if dtype in (None, torch.float16) else (2 * sums.numel(), RESULTS)


def _without_outliers(rows: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Returns the results of ``int8_vectorwise_quant`` for rows without outliers, whose number depends on values."""
    found = torch.empty(rows.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(rows.numel() // rows.shape[-1], dtype=torch.float32, device="meta")
    return found, scales, torch.empty(0, dtype=torch.int64, device="meta") if threshold else None


def notes_of_few_bits(modules: Iterable[nn.Module]) -> list[str]:
    """Returns a note on the assumption about 8-bit layers: no input exceeds the outlier threshold."""
    layers = [each for each in modules if type(each).__module__.startswith("bitsandbytes.")]
    thresholds: set[float] = {getattr(getattr(each, "state", None), "threshold", 0.0) for each in layers}
    if not any(thresholds):
        return []
    return [
        f"of layers in 8 bits no input is assumed to have a number beyond their threshold ({max(thresholds):g}): "
        "columns with such outliers are multiplied in 16 bits besides, which takes a little more"
    ]


# Compositions of other operators, each with its own rule. A card's 4-bit product kernel serves less than about 512
# rows, fewer than a training step has; for more rows the weight is unpacked for a product of PyTorch's.
_COMPOSED = OpRule(composed_on=("cpu", "cuda"))

RULES = {
    **{f"bitsandbytes.{name}": _COMPOSED for name in ("gemm_4bit", "int8_mixed_scaled_mm", "int8_scaled_mm")},
    "bitsandbytes.int8_vectorwise_quant": OpRule(
        program=_rows_in_8_bits, order=(1, 0), results=_without_outliers, results_on=("cpu", "cuda")
    ),
    "bitsandbytes.int8_mm_dequant": OpRule(program=_sums_as_floats),
}
