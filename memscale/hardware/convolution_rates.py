"""What convolutions take on a card, where tensor cores are of little use to them: few channels, or groups of them.

Measured on an H100 (cuDNN 9.19; `benchmarks/bench_operators.py --convolutions`): 297 convolutions, and the steps of
ResNet-50, ViT, Swin and ConvNeXt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memscale.hardware.work import Work

CONVOLUTIONS = ("convolution", "convolution_backward")


class _Shares(NamedTuple):
    """Of a rate of products, what the result, the gradient of the image and that of the weight reach."""

    result: float
    image: float
    weight: float


_USUAL = _Shares(0.4, 0.3, 0.3)
# A stem reads images of three colours, and a kernel of patches does. In 16 bits, and in 32.
_FEW = 8
_OF_FEW = _Shares(0.048, 0.024, 0.054), _Shares(0.076, 0.042, 0.078)
# Of the rate without tensor cores; and of channels that lie last, as ConvNeXt has them.
_OF_GROUPS = _Shares(0.05, 0.04, 0.024), _Shares(0.06, 0.045, 0.024)
_OF_LAST_GROUPS = _Shares(0.2, 0.1, 0.2), _Shares(0.1, 0.09, 0.007)


def of_convolution(op: str, args: Sequence[Any], work: Work) -> Work:
    """`work`, by `work_of`, with as much arithmetic as takes its time at the rate of products.

    >>> import torch
    >>> image, kernel = torch.empty(64, 96, 56, 56, device="meta"), torch.empty(96, 1, 7, 7, device="meta")
    >>> call = (image, kernel, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 96)
    >>> of_convolution("convolution", call, Work(2 * image.numel() * 49, 2 * image.nbytes, "tfloat32")).dtype
    'float32'
    """
    is_backward = op == "convolution_backward"
    image, kernel = args[1:3] if is_backward else args[:2]
    transposed, groups = (args[7], args[9]) if is_backward else (args[6], args[8])
    at = 0 if work.dtype in ("bfloat16", "float16") else 1
    shares = _OF_FEW[at] if kernel.shape[0 if transposed else 1] < _FEW else _USUAL
    if groups > 1:
        last = not image.is_contiguous() and image.stride(1) == 1
        shares = (_OF_LAST_GROUPS if last else _OF_GROUPS)[at]
        work = replace(work, dtype="float32")
    if not is_backward:
        return replace(work, flops=round(work.flops / shares.result))
    wanted = [share for share, is_wanted in zip(shares[1:], args[10], strict=False) if is_wanted]
    each = work.flops / max(1, len(wanted))
    return replace(work, flops=round(sum(each / share for share in wanted)))
