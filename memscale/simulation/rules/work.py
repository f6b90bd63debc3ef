"""The work of an operator, from the shapes of its arguments: its arithmetic and its memory traffic."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memscale.core import OpOverload
from memscale.hardware import Work
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.traffic import traffic_of


def work_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Work:
    """Returns the work of a call of `op`, from the shapes of its arguments and results, without reading values.

    FLOPs are counted for matrix products, convolutions, attention and recurrences. All other operators are assumed to
    take the time of their traffic. float32 arithmetic is ``"tfloat32"`` if PyTorch's settings allow TF32
    (``torch.backends``: by default for convolutions, not for products).

    Args:
        op: an operator, as a dispatch mode sees it.
        args, kwargs, outputs: its arguments and results; fake, meta or real tensors.

    >>> x = torch.empty(8, 4, dtype=torch.bfloat16)
    >>> work_of(torch.ops.aten.mm.default, (x, x.t()), {}, torch.empty(8, 8, dtype=torch.bfloat16))[:3]
    (512, 256, 'bfloat16')
    """
    flops = flops_of(op, args, kwargs, outputs)
    nbytes = traffic_of(op, args, kwargs, outputs)
    if not flops and not nbytes:
        return _NOTHING
    dtype = _dtype(args) or _dtype(list(kwargs.values())) or _dtype([outputs])
    if flops and dtype == "float32" and _allows_tfloat32(op.overloadpacket.__name__):
        dtype = "tfloat32"
    return Work(flops, nbytes, dtype)


def flops_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """Returns the additions and multiplications of a matrix product, convolution, attention or recurrence; else 0.

    Counts the work of the kernels. `torch.utils.flop_counter` differs: it counts causal attention as full and a grouped
    convolution's weight gradient as dense, and has no formula for recurrences and for attention on the CPU. Operators
    without a formula in their rule use its registry, and so a user's own formula from `register_flop_formula`.

    >>> a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta")
    >>> flops_of(torch.ops.aten.mm.default, (a, b), {}, torch.empty(2, 5, device="meta"))
    60
    """
    formula = rule_of(op).flops
    if formula is not None:
        flops = formula({**dict(zip(_names(op), args, strict=False)), **kwargs}, outputs)
    else:
        registered = flop_registry.get(op.overloadpacket)
        if registered is None:
            return 0
        flops = registered(*args, **kwargs, out_val=outputs)
    # A complex product is four real products.
    return int(flops) * (4 if _is_complex(args) else 1)


_NOTHING = Work(0, 0, "")
_NAMES: dict[torch.dtype, str] = {}


@functools.cache
def _names(op: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def _is_complex(args: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in args)


def _dtype(values: Sequence[Any]) -> str:
    """Returns the name of the dtype of the first tensor; for complex numbers, the dtype of their parts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            if dtype not in _NAMES:
                _NAMES[dtype] = str(dtype.to_real()).removeprefix("torch.")
            return _NAMES[dtype]
        if isinstance(value, (list, tuple)) and (name := _dtype(value)):
            return name
    return ""


def _allows_tfloat32(name: str) -> bool:
    convolutions, recurrences, products = tfloat32()
    return convolutions if "convolution" in name else recurrences if "rnn" in name else products


def tfloat32() -> tuple[bool, bool, bool]:
    """Returns whether PyTorch's settings allow TF32 in convolutions, in recurrences, and in products."""
    cudnn: Any = torch.backends.cudnn
    convolutions, recurrences, products = (
        each.fp32_precision == "tf32" for each in (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul)
    )
    return convolutions, recurrences, products
