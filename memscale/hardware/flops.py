"""Counts the FLOPs of one operator from the shapes of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memscale.core import OpOverload

Arguments = Mapping[str, Any]


def flops_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """Returns the additions and multiplications of a matrix product, convolution, attention or recurrence; else 0.

    Counts the work of the kernels. `torch.utils.flop_counter` differs: it counts causal attention as full and a grouped
    convolution's weight gradient as dense, and has no formula for recurrences and for attention on the CPU. Operators
    without a formula here use its registry, and so a user's own formula from `register_flop_formula`.

    >>> a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta")
    >>> flops_of(torch.ops.aten.mm.default, (a, b), {}, torch.empty(2, 5, device="meta"))
    60
    """
    formula = _FORMULAS.get(op.overloadpacket.__name__)
    if formula is not None and op.namespace in ("aten", "bitsandbytes"):
        flops = formula({**dict(zip(_names(op), args, strict=False)), **kwargs}, outputs)
    else:
        registered = flop_registry.get(op.overloadpacket)
        if registered is None:
            return 0
        flops = registered(*args, **kwargs, out_val=outputs)
    # A complex product is four real products.
    return int(flops) * (4 if _is_complex(args) else 1)


@functools.cache
def _names(op: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def _is_complex(args: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in args)


def _product(left: str) -> Callable[[Arguments, Any], int]:
    """Returns the formula of a product whose results sum over the last dimension of the argument `left`."""

    def formula(given: Arguments, outputs: Any) -> int:
        return int(2 * prod(outputs.shape) * given[left].shape[-1])

    return formula


def _batch_sum(given: Arguments, outputs: Any) -> int:
    return int(2 * prod(given["batch1"].shape) * given["batch2"].shape[-1])


def _grouped_product(given: Arguments, outputs: Any) -> int:
    """Returns the FLOPs of separate products of groups, which split rows, columns or the summed dimension."""
    left, right = given["self"], given["mat2"]
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1
    return int(2 * prod(left.shape) // groups * right.shape[-1])


def _attended_pairs(given: Arguments) -> int:
    """Returns the number of (query, key) pairs that a kernel computes: with a causal mask, those before the mask."""
    *batch, queries, _ = given["query"].shape
    keys = given["key"].shape[-2]
    pairs = queries * keys
    if given.get("is_causal", False):
        triangle = min(queries, keys)
        pairs = triangle * (triangle + 1) // 2 + (queries - triangle) * keys
    return int(prod(batch) * pairs)


def _attention(given: Arguments, outputs: Any) -> int:
    return int(2 * _attended_pairs(given) * (given["query"].shape[-1] + given["value"].shape[-1]))


def _attention_backward(given: Arguments, outputs: Any) -> int:
    """Returns the FLOPs of five products: scores again, and the gradients of scores, query, key and value."""
    return int(2 * _attended_pairs(given) * (3 * given["query"].shape[-1] + 2 * given["value"].shape[-1]))


def _convolution_backward(given: Arguments, outputs: Any) -> int:
    """Returns the FLOPs of the gradients of input and weight, each as many as the forward's."""
    batch, _, *places = (given["input"] if given["transposed"] else given["grad_output"]).shape
    return int(2 * batch * prod(places) * prod(given["weight"].shape) * sum(given["output_mask"][:2]))


def _recurrence(given: Arguments, outputs: Any) -> int:
    """Returns the FLOPs of every row of every step times every weight matrix."""
    weights = [value for name, value in given.items() if name.startswith("weight")]
    parts = [part for value in weights for part in (value if isinstance(value, (list, tuple)) else [value])]
    matrices = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 2]
    return int(2 * prod(given["input"].shape[:-1]) * sum(prod(matrix.shape) for matrix in matrices))


def _recurrence_backward(given: Arguments, outputs: Any) -> int:
    return 2 * _recurrence(given, outputs)


_RECURRENCES = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable")  # fmt: skip
_FORMULAS: dict[str, Callable[[Arguments, Any], int]] = {
    **{name: _product("self") for name in ("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_scaled_mm_v2")},
    **{name: _product("mat1") for name in ("addmm", "addmm_", "_addmm_activation")},
    **{name: _product("batch1") for name in ("baddbmm", "baddbmm_")},
    **{name: _product("mat") for name in ("addmv", "addmv_")},
    "linear": _product("input"),
    "int8_linear_matmul": _product("A"),  # of bitsandbytes
    "addbmm": _batch_sum,
    "addbmm_": _batch_sum,
    "_grouped_mm": _grouped_product,
    "_scaled_grouped_mm": _grouped_product,
    "_scaled_grouped_mm_v2": _grouped_product,
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS},
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_RECURRENCES, _recurrence),
    **{f"{name}_backward": _recurrence_backward for name in _RECURRENCES},
}
