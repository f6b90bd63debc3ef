"""What single operators take on a card, where that is not what their traffic and arithmetic would at its usual rates.

Measured on an H100 (torch 2.11, cuDNN 9.19; `benchmarks/bench_operators.py`): each operator alone, on tensors that no
cache holds, and in steps of GPT-2 XL, a Llama, BERT and ViT. Kernels that go over their numbers once reach 85 % of the
data sheet's bandwidth, and products 80 % of its arithmetic, as `roofline` has it for all cards; the others take so many
times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memscale.hardware.work import Work

# How often a kernel goes over its numbers, with the time that it loses on the way: in 16 bits, and in 32.
_PASSES: dict[str, tuple[float, float]] = {
    "_foreach_add_": (1.3, 1.1),
    "_foreach_addcdiv_": (1.08, 1.0),
    "_foreach_addcmul_": (1.12, 1.08),
    "_foreach_div_": (1.35, 1.1),
    "_foreach_lerp_": (1.12, 1.08),
    "_foreach_mul_": (1.28, 1.1),
    "_foreach_sqrt": (1.38, 1.13),
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
    "native_batch_norm": (4.5, 1.95),
    "native_batch_norm_backward": (3.5, 2.7),
    "native_group_norm": (3.3, 2.1),
    "native_group_norm_backward": (3.7, 2.1),
    "roll": (4.4, 3.0),
    "sort": (9.5, 9.5),
    "upsample_nearest2d": (2.9, 1.8),
    "upsample_nearest2d_backward": (1.8, 1.2),
}

# The same of norms, and what more it is of a row of one number: narrow rows are slower. In 16 bits, and in 32.
_PASSES_BY_WIDTH: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "native_layer_norm": ((1.1, 640.0), (0.9, 400.0)),
    "native_layer_norm_backward": ((2.5, 300.0), (1.9, 90.0)),
}
# Of rows that one warp holds, as those of attention's scores mostly are, a softmax is one pass.
_OF_SHORT_ROWS, _SHORT_ROW = {"_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"}, 1024

# Of element-wise kernels whose operands do not lie as their results: they are repeated along a dimension or permuted.
# A copy of columns into rows is slower still: each number comes with others that nobody wants.
_OF_OTHER_LAYOUT, _OF_COLUMNS = (2.1, 1.5), (5.7, 3.0)
_ELEMENTWISE = {"add", "add_", "clone", "copy_", "div", "div_", "mul", "mul_", "sub", "where"}

# The share of a product's rate, on cards before Hopper and from it on, whose tensor cores kernels written for Ampere
# leave half idle. Before: FlashAttention-2's paper has 73 % and 63 % of an A100's peak, products 80 to 85 %.
_SHARES: dict[str, tuple[float, float]] = {
    "_scaled_dot_product_cudnn_attention": (0.8, 0.8),
    "_scaled_dot_product_cudnn_attention_backward": (0.7, 0.7),
    "_scaled_dot_product_flash_attention": (0.9, 0.4),
    "_scaled_dot_product_flash_attention_backward": (0.75, 0.25),
    "_scaled_dot_product_efficient_attention": (0.5, 0.22),
    "_scaled_dot_product_efficient_attention_backward": (0.4, 0.14),
    "_grouped_mm": (0.7, 0.7),
}
# Of 32-bit numbers, which go without tensor cores.
_SHARES_32 = {
    "_scaled_dot_product_efficient_attention": 0.55,
    "_scaled_dot_product_efficient_attention_backward": 0.52,
}

# The memory-efficient kernels work on blocks of so many tokens; windows of 49 of them take all of one.
_EFFICIENT_TOKENS = 64
_EFFICIENT = {"_scaled_dot_product_efficient_attention": 0, "_scaled_dot_product_efficient_attention_backward": 1}
# Hopper's attention of cuDNN works on rows of so many tokens, and its time is that of its arithmetic and that of its
# traffic, which it goes over so often, one after the other.
_TOKENS = 128
_ATTENTION = {
    "_scaled_dot_product_cudnn_attention": 1.1,
    "_scaled_dot_product_cudnn_attention_backward": 2.1,
}
_SHARE_OF_PLAIN_32 = 0.95  # of Hopper's float32 without tensor cores

# A sum over rows leaves few columns, and goes in two rounds: it takes as long as so many more launches.
_SUMS = {"sum", "mean"}
_LAUNCHES_OF_COLUMNS = 3
_LEAST_BYTES = 1 << 20

# The arguments of a product whose rows are looked at.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
# Rows of 16-bit numbers that begin at no multiple of 16 bytes, or of 4, are nothing for Hopper's cores.
_UNALIGNED = ((8, 0.3), (2, 0.16))

# Of 297 convolutions and the steps of ResNet-50, ViT, Swin and ConvNeXt (`--convolutions`): tensor cores are of little
# use to few channels, or groups of them.
_CONVOLUTIONS = ("convolution", "convolution_backward")


class _Shares(NamedTuple):
    """Of a rate of products, what the result, the gradient of the image and that of the weight reach."""

    result: float
    image: float
    weight: float


# Of all others, by the same run.
_USUAL = _Shares(0.4, 0.3, 0.3)
# A stem reads images of three colours, and a kernel of patches does. In 16 bits, and in 32.
_FEW = 8
_OF_FEW = _Shares(0.048, 0.024, 0.054), _Shares(0.076, 0.042, 0.078)
# Of the rate without tensor cores; and of channels that lie last, as ConvNeXt has them.
_OF_GROUPS = _Shares(0.05, 0.04, 0.024), _Shares(0.06, 0.045, 0.024)
_OF_LAST_GROUPS = _Shares(0.2, 0.1, 0.2), _Shares(0.1, 0.09, 0.007)


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
    at = 0 if in_halves else 1
    passes = _PASSES.get(op, (1.0, 1.0))[at]
    if op in _PASSES_BY_WIDTH:
        wide, of_one = _PASSES_BY_WIDTH[op][at]
        passes = wide + of_one / max(1, args[0].shape[-1])
    elif op in _ELEMENTWISE:
        passes = _passes_of_layouts(op, args)[at]
    elif op in _OF_SHORT_ROWS and args[0].dim() and args[0].stride(-1) == 1 and args[0].shape[-1] <= _SHORT_ROW:
        passes = 1.0
    elif op in _CONVOLUTIONS:
        return _of_convolution(op, args, work)
    since_hopper = capability is not None and capability >= (9, 0)
    share = _SHARES.get(op, (1.0, 1.0))[since_hopper] if in_halves else _SHARES_32.get(op, 1.0)
    if since_hopper and op in _PRODUCTS:
        if in_halves:
            share *= _aligned_share([args[at] for at in _PRODUCTS[op]])
        elif work.dtype == "float32":
            share *= _SHARE_OF_PLAIN_32
    elif op in _EFFICIENT:
        share *= _whole_share(args[_EFFICIENT[op]], _EFFICIENT_TOKENS)
    elif since_hopper and op in _ATTENTION:
        share *= _whole_share(args[0 if not op.endswith("backward") else 1], _TOKENS)
    if passes == share == 1.0:
        return work
    return replace(work, flops=round(work.flops / share), nbytes=round(work.nbytes * passes))


def _of_convolution(op: str, args: Sequence[Any], work: Work) -> Work:
    """`work`, by `work_of`, with as much arithmetic as takes its time at the rate of products.

    >>> image, kernel = torch.empty(64, 96, 56, 56, device="meta"), torch.empty(96, 1, 7, 7, device="meta")
    >>> call = (image, kernel, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 96)
    >>> _of_convolution("convolution", call, Work(2 * image.numel() * 49, 2 * image.nbytes, "tfloat32")).dtype
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


def beside(op: str, args: Sequence[Any], work: Work, capability: tuple[int, int] | None) -> tuple[int, int]:
    """What a kernel takes on top of `on_card`: so many launches more, and the time of so many bytes.

    Half of what a product writes goes out when it has computed: what the products of five models took, of 768 to 14336
    numbers in a row, is met within 6 % in the median with it, and those of 768 without it within 10.

    >>> table = torch.empty(25_216, 768, dtype=torch.bfloat16, device="meta")
    >>> beside("sum", (table, [0]), Work(0, table.nbytes, "bfloat16"), (9, 0))
    (3, 0)
    >>> beside("sum", (table, [1]), Work(0, table.nbytes, "bfloat16"), (9, 0))
    (0, 0)
    """
    since_hopper = capability is not None and capability >= (9, 0)
    if op in _SUMS and work.nbytes > _LEAST_BYTES and _is_over_rows(args):
        return _LAUNCHES_OF_COLUMNS, 0
    if since_hopper and op in _ATTENTION:
        return 0, round(_ATTENTION[op] * work.nbytes)
    if since_hopper and op in _PRODUCTS:
        left, right = (args[at] for at in _PRODUCTS[op])
        return 0, left.shape[:-1].numel() * right.shape[-1] * left.itemsize // 2
    return 0, 0


def _is_over_rows(args: Sequence[Any]) -> bool:
    """Whether a reduction leaves the dimension whose numbers lie one after the other."""
    source, dims = args[0], args[1] if len(args) > 1 else None
    along = [dim for dim in range(source.dim()) if source.shape[dim] > 1]
    if not dims or not along:
        return False
    innermost = min(along, key=source.stride)
    return innermost not in [dim % source.dim() for dim in dims]


def _passes_of_layouts(op: str, args: Sequence[Any]) -> tuple[float, float]:
    operands = [each for each in args if isinstance(each, torch.Tensor) and each.numel() > 1]
    if not operands:
        return 1.0, 1.0
    whole = max(operands, key=torch.Tensor.numel)
    if op == "clone":  # of what does not lie in a row it is made to
        if whole.is_contiguous():
            return 1.0, 1.0
        return _OF_OTHER_LAYOUT if whole.stride(-1) in (0, 1) else _OF_COLUMNS
    alike = all(each.shape == whole.shape and each.stride() == whole.stride() for each in operands)
    return (1.0, 1.0) if alike and _is_dense(whole) else _OF_OTHER_LAYOUT


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the numbers of `tensor` lie one after the other, in whatever order of its dimensions."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def _whole_share(query: torch.Tensor, block: int) -> float:
    """The share of its blocks of tokens that attention has tokens for, along queries and keys."""
    tokens = query.shape[-2]
    return float((tokens / (-(-tokens // block) * block)) ** 2)


def _aligned_share(factors: list[torch.Tensor]) -> float:
    rows = [max(factor.stride()[-2:]) for factor in factors if min(factor.shape[-2:]) > 1]
    rows.append(factors[1].shape[-1])  # of the product
    return min((left for multiple, left in _UNALIGNED if any(row % multiple for row in rows)), default=1.0)
