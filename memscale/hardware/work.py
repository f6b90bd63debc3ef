"""The work of an operator, from the shapes of its arguments: its arithmetic and its memory traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memscale.core import OpOverload
from memscale.hardware.flops import flops_of
from memscale.hardware.traffic import traffic_of

#: The dtype whose rate applies if a device has no rate for the key: the same circuits compute both.
AT_THE_RATE_OF = {
    "tfloat32": "float32",  # TF32 is allowed, not required; a device without TF32 computes in float32
    "float8_e5m2": "float8_e4m3fn",
    "float8_e5m2fnuz": "float8_e4m3fnuz",
}


class Work(NamedTuple):
    """The arithmetic and the memory traffic of an operator.

    Args:
        flops: additions and multiplications.
        nbytes: bytes read from and written to the device's memory.
        dtype: the dtype of the arithmetic, as in ``Hardware.flops_per_second``; ``""`` for empty work.
        launches: the number of kernels besides the first.
        extra_bytes: bytes that are moved after the arithmetic.
    """

    flops: int
    nbytes: int
    dtype: str
    launches: int = 0
    extra_bytes: int = 0


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


_NOTHING = Work(0, 0, "")
_NAMES: dict[torch.dtype, str] = {}


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
