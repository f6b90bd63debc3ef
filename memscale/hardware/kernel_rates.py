"""What single operators take on a card, where that is not what their traffic and arithmetic would at its usual rates.

Measured on an H100 (torch 2.11, cuDNN 9.19; `benchmarks/bench_operators.py`): each operator alone, on tensors that no
cache holds. There, kernels that go over their numbers once reach 85 % of the data sheet's bandwidth, and products 80 %
of its arithmetic, as `roofline` has it for all cards; the others take so many times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memscale.hardware.work import Work

# How often a kernel goes over its numbers, with the time that it loses on the way: in 16 bits, and in 32.
_PASSES: dict[str, tuple[float, float]] = {
    "_fused_adamw_": (1.25, 1.1),
    "_fused_rms_norm": (1.2, 1.2),
    "_fused_rms_norm_backward": (2.5, 2.0),
    "_log_softmax": (1.8, 1.5),
    "_log_softmax_backward_data": (1.3, 1.3),
    "_safe_softmax": (3.2, 3.2),
    "_softmax": (1.9, 1.7),
    "_softmax_backward_data": (2.1, 1.9),
    "_to_copy": (1.5, 1.5),
    "avg_pool2d": (3.1, 1.7),
    "avg_pool2d_backward": (9.7, 5.3),
    "cumsum": (3.5, 1.9),
    "embedding_dense_backward": (5.0, 2.7),
    "index_add_": (3.3, 1.6),
    "masked_fill": (1.7, 1.8),
    "max_pool2d_with_indices": (2.5, 1.6),
    "max_pool2d_with_indices_backward": (5.0, 3.2),
    "native_batch_norm": (4.5, 2.8),
    "native_batch_norm_backward": (3.5, 2.4),
    "native_group_norm": (3.3, 2.1),
    "native_group_norm_backward": (3.7, 2.1),
    "native_layer_norm": (1.5, 1.4),
    "native_layer_norm_backward": (2.8, 2.2),
    "sort": (9.5, 9.5),
    "upsample_nearest2d": (2.9, 1.8),
    "upsample_nearest2d_backward": (1.8, 1.2),
}

# The share of a product's rate, on cards before Hopper and from it on, whose tensor cores kernels written for Ampere
# leave half idle. Before: FlashAttention-2's paper has 73 % and 63 % of an A100's peak, products 80 to 85 %.
_SHARES: dict[str, tuple[float, float]] = {
    "_scaled_dot_product_cudnn_attention": (0.8, 0.6),
    "_scaled_dot_product_cudnn_attention_backward": (0.7, 0.45),
    "_scaled_dot_product_flash_attention": (0.9, 0.4),
    "_scaled_dot_product_flash_attention_backward": (0.75, 0.25),
    "_scaled_dot_product_efficient_attention": (0.5, 0.22),
    "_scaled_dot_product_efficient_attention_backward": (0.4, 0.14),
    "_grouped_mm": (0.7, 0.7),
    "convolution": (0.4, 0.4),
    "convolution_backward": (0.3, 0.3),
}
# Of 32-bit numbers, which go without tensor cores.
_SHARES_32 = {
    "_scaled_dot_product_efficient_attention": 0.55,
    "_scaled_dot_product_efficient_attention_backward": 0.52,
    "convolution": 0.4,
    "convolution_backward": 0.3,
}

_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
# Rows of 16-bit numbers that begin at no multiple of 16 bytes, or of 4, are nothing for Hopper's cores.
_UNALIGNED = ((8, 0.3), (2, 0.16))


def on_card(op: str, args: Sequence[Any], work: Work, capability: tuple[int, int] | None) -> Work:
    """`work` as long as it takes: what a kernel goes over twice counts twice, and half a rate doubles the arithmetic.

    Args:
        op: the operator's name, without its namespace and overload.
        args: its positional arguments.
        work: by `work_of`.
        capability: of the card, (major, minor).

    >>> left, right = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((64, 1600), (1600, 50257)))
    >>> on_card("mm", (left, right), Work(16_000, 0, "bfloat16"), (9, 0))
    Work(flops=100000, nbytes=0, dtype='bfloat16')
    """
    in_halves = work.dtype in ("bfloat16", "float16")
    passes = _PASSES.get(op, (1.0, 1.0))[0 if in_halves else 1]
    since_hopper = capability is not None and capability >= (9, 0)
    share = _SHARES.get(op, (1.0, 1.0))[since_hopper] if in_halves else _SHARES_32.get(op, 1.0)
    if op in _PRODUCTS and since_hopper and in_halves:
        share *= _aligned_share([args[at] for at in _PRODUCTS[op]])
    if passes == share == 1.0:
        return work
    return replace(work, flops=round(work.flops / share), nbytes=round(work.nbytes * passes))


def _aligned_share(factors: list[torch.Tensor]) -> float:
    rows = [max(factor.stride()[-2:]) for factor in factors if min(factor.shape[-2:]) > 1]
    rows.append(factors[1].shape[-1])  # of the product
    return min((left for multiple, left in _UNALIGNED if any(row % multiple for row in rows)), default=1.0)
