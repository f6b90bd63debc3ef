"""Elementwise operators, of optimizers too, and operators that make, move, choose or read numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memscale.simulation.rules.rule import (
    RESULTS,
    CardTraits,
    OpRule,
    Program,
    Touch,
    by_layouts,
    of_clone,
    passes,
    taken,
)


def _norms(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of multi-tensor norms: one partial sum for each chunk, padded to the largest tensor's chunks.

    Source: ``foreach_tensor_norm_cuda`` in aten/src/ATen/native/cuda/ForeachReduceOp.cu (kChunkSize = 65536).
    """
    tensors = args[0]
    chunks = max(math.ceil(tensor.numel() / 65536) for tensor in tensors)
    return *taken(len(tensors) * chunks * max(4, tensors[0].itemsize)), RESULTS


def _histogram(input: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """Computes ``torch.histc`` of integers, which counts the tokens of experts: a CPU lacks the operator."""
    counted: torch.Tensor = torch.ops.aten.histc.default(input.float(), *options, **named)
    return counted.to(input.dtype)


_OF_SHAPE = OpRule(values="constant")
_CHOICE = OpRule(values="choice")
_BY_PLACE = OpRule(by_place=True)


# Written without being read, which schemas do not express.
_OVERWRITTEN = {"self": Touch.WRITE}
# Optimizers write the gradients only if a gradient scaler is passed.
_GRADIENTS = {"grads": Touch.READ}

RULES = {
    "aten.native_dropout": OpRule(order=(1, 0)),
    "aten.masked_fill": OpRule(time=passes(1.7, 1.8)),
    "aten.cumsum": OpRule(time=passes(3.5, 1.9)),
    **{f"aten._fused_{name}_": OpRule(touches=_GRADIENTS) for name in ("adam", "sgd", "adagrad")},
    "aten._fused_adamw_": OpRule(touches=_GRADIENTS, time=passes(1.25, 1.1)),
    "aten._foreach_add_": OpRule(time=passes(1.3, 1.1)),
    "aten._foreach_addcdiv_": OpRule(time=passes(1.08, 1.0)),
    "aten._foreach_addcmul_": OpRule(time=passes(1.12, 1.08)),
    "aten._foreach_div_": OpRule(time=passes(1.35, 1.1)),
    "aten._foreach_lerp_": OpRule(time=passes(1.12, 1.08)),
    "aten._foreach_mul_": OpRule(time=passes(1.28, 1.1)),
    "aten._foreach_sqrt": OpRule(time=passes(1.38, 1.13)),
    "aten._foreach_norm.Scalar": OpRule(program=_norms),
    "aten.histc": OpRule(results=_histogram, computed=_histogram),
    **{f"aten.{name}": OpRule(time=by_layouts) for name in ("add", "div", "mul", "sub", "where")},
    **{f"aten.{name}_": OpRule(time=by_layouts) for name in ("add", "div", "mul")},
    **{f"aten.{name}.Tensor": OpRule(time=by_layouts, in_place=True) for name in ("add", "mul", "sub")},
    **{f"aten.{name}": OpRule(composed_on=("cuda",)) for name in ("dist.default", "isinf", "ldexp.Tensor", "mvlgamma")},
    # Operators that move numbers: views, constants, copies, joins.
    **{f"aten.{name}": OpRule(method=getattr(torch.Tensor, name.partition(".")[0])) for name in (
        "detach", "expand", "permute", "select.int", "t", "transpose.int", "unsqueeze", "view",
    )},
    **{f"aten.{name}": _OF_SHAPE for name in ("ones_like", "new_ones", "new_zeros", "new_full")},
    **{f"aten.{name}": OpRule(values="constant", by_place=True) for name in ("zeros_like", "full_like")},
    **{f"aten.{name}": _CHOICE for name in ("topk", "argsort", "multinomial")},
    **{f"aten.{name}": _BY_PLACE for name in (
        "arange", "flip", "full", "lift_fresh_copy", "ones", "rand", "randint", "randn", "scalar_tensor",
        "select_scatter", "slice_scatter", "_unsafe_index", "zeros",
    )},
    "aten.empty": OpRule(empty=True, by_place=True),
    **{f"aten.{name}": OpRule(empty=True) for name in (
        "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    )},
    **{f"aten.{name}": OpRule(scratch="nothing") for name in ("_unsafe_view", "unsafe_split")},
    **{f"aten.{name}": OpRule(touches=_OVERWRITTEN, scratch="nothing") for name in ("fill_", "zero_")},
    **{f"aten.{name}": OpRule(touches=_OVERWRITTEN) for name in (
        "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
        "_foreach_copy_", "_foreach_zero_",
    )},
    "aten.sort": OpRule(values="choice", time=passes(9.5, 9.5)),
    "aten._local_scalar_dense": OpRule(values="reads"),
    "aten.equal": OpRule(values="reads"),
    "aten.resize_": OpRule(resizes=True),
    "aten.resize_as_": OpRule(resizes=True),
    "aten._to_copy": OpRule(scratch="nothing", by_place=True, time=passes(1.5, 1.5)),
    "aten.clone": OpRule(scratch="nothing", time=of_clone),
    "aten.copy_": OpRule(touches=_OVERWRITTEN, scratch="nothing", time=by_layouts),
    "aten.constant_pad_nd": OpRule(scratch="nothing", by_place=True),
    "aten.cat": OpRule(scratch="converts"),
    "aten.stack": OpRule(scratch="converts"),
    "aten._trilinear": OpRule(composed_on=("cuda",)),
    "aten._euclidean_dist": OpRule(composed_on=("cuda",)),
    "aten.linalg_pinv.atol_rtol_tensor": OpRule(composed_on=("cuda",)),
}  # fmt: skip
