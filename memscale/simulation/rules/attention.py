"""The rules of attention kernels: their arithmetic, and on a card their allocations while they run, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

from memscale.hardware import Work
from memscale.simulation.allocator.block_pool import round_up
from memscale.simulation.rules.rule import (
    PLAIN,
    RESULTS,
    Arguments,
    Capability,
    CardTraits,
    OpRule,
    Program,
    Time,
    copied,
    is_deterministic,
    share,
    shared,
    since_hopper,
    taken,
    whole_share,
)


def _attended_pairs(given: Arguments) -> int:
    """Returns the number of (query, key) pairs that a kernel computes: with a causal mask, those before the mask."""
    *batch, queries, _ = given["query"].shape
    keys = given["key"].shape[-2]
    pairs = queries * keys
    if given.get("is_causal", False):
        triangle = min(queries, keys)
        pairs = triangle * (triangle + 1) // 2 + (queries - triangle) * keys
    return int(prod(batch) * pairs)


def _flops(given: Arguments, results: Any) -> int:
    return int(2 * _attended_pairs(given) * (given["query"].shape[-1] + given["value"].shape[-1]))


def _flops_backward(given: Arguments, results: Any) -> int:
    """Returns the FLOPs of five products: scores again, and the gradients of scores, query, key and value."""
    return int(2 * _attended_pairs(given) * (3 * given["query"].shape[-1] + 2 * given["value"].shape[-1]))


def _flash_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a float32 accumulator for the query's gradient, and per-head gradients of shared keys and
    values.

    Source: ``mha_bwd`` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, and
    ``_flash_attention_backward`` in attention_backward.cu, which makes the gradient and the output contiguous.
    """
    grad, query, key, _, out = args[:5]
    batch, heads, queries, head = query.shape
    rows = round_up(queries, 128)
    splits = ceil(card.multiprocessors / (batch * heads)) if is_deterministic() else 1
    width = round_up(head, 32) if head <= 192 else 256
    shared = 0 if key.size(1) == heads else batch * key.size(2) * heads * head * query.itemsize
    copies = taken(copied(grad.transpose(1, 2)), copied(out.transpose(1, 2)))
    accumulator = splits * batch * rows * heads * width * 4
    return *copies, RESULTS, *taken(batch * heads * rows * 4, accumulator, shared, shared)


def _efficient_forward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a float32 output for heads that exceed the registers.

    Source: ``kNeedsOutputAccumulatorBuffer`` in mem_eff_attention/kernel_forward.h; kernels/cutlassF.h has
    kernels for heads up to 64, up to 128 and larger.
    """
    query, key, value = args[:3]
    if query.itemsize == 4 or max(key.size(-1), value.size(-1)) <= 128:
        return PLAIN
    return RESULTS, prod(query.shape[:3]) * value.size(-1) * 4


# Tokens a block: of the memory-efficient kernels (windows of 49 take a whole block), and of cuDNN's.
_EFFICIENT_TOKENS, _CUDNN_TOKENS = 64, 128
# 163 KiB of shared memory a block and more (CUDA C programming guide, technical specifications per compute capability)
# suffice for the kernels with 128 queries a block. Inferred: these kernels need more than 99 KiB.
_LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)})


def _efficient_tile(half: bool, width: int, capability: Capability) -> tuple[int, int, bool]:
    """Returns queries and keys a block, and whether the gradients of keys and values outgrow the registers."""
    large = capability in _LARGE_SHARED_MEMORY
    if half and capability >= (8, 0):
        if width <= 64:
            return 64, 64, False
        if width <= 96 and capability in ((8, 6), (8, 9)):
            return 128, 64, False
        if width <= 128 and large:
            return 128, 128, False
        return (128 if width > 128 and large else 64), 64, True
    if half and (width <= 64 or capability == (7, 5)):
        return (64 if width <= 64 else 128), 64, width > 128
    # A float32 gradient accumulates in itself.
    return (128 if width > 64 and large else 64), 64, half


def _efficient_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of row sums, and of float32 tiles of the gradients that outgrow registers.

    Source: ``_efficient_attention_backward`` in attention_backward.cu, ``workspace_size`` in
    mem_eff_attention/kernel_backward.h and the kernels listed in kernels/cutlassB.h.
    """
    grad, query, key, value = args[:4]
    batch, heads, queries, head = query.shape
    keys, value_head, half = key.size(2), value.size(-1), query.itemsize == 2
    rows, columns, spills = _efficient_tile(half, max(head, value_head), card.capability)

    row_sums = batch * heads * queries * 4
    product = batch * heads * queries * value_head * 4
    first: Program = (row_sums,)
    if not half:
        # The kernel takes the row sums of gradient times output as an input.
        first = product, row_sums, row_sums, -row_sums, -product
    elif (7, 0) <= card.capability < (7, 5) and spills:
        first = product, product, product, row_sums, row_sums, -row_sums, -product, -product, -product

    floats = 0
    if half or card.capability >= (7, 0):
        # A tile begins with a lock, a counter and padding.
        floats = ceil(queries / rows) * ceil(head / columns) * (4 + rows * columns)
    if spills:
        splits = max(1, min(ceil(keys / columns), 200 // (batch * heads)))
        if card.capability < (7, 0) or is_deterministic():
            splits = 1
        floats += splits * columns * (round_up(head, rows) + round_up(value_head, rows))
    tiles = batch * heads * round_up(floats, 4) * 4
    return *taken(copied(grad.transpose(1, 2))), RESULTS, *first, *taken(tiles), -row_sums


def _cudnn_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a float32 accumulator for the query's gradient, and of the row sums.

    Source: ``CompositeSDPABackwardNode`` in scaled_dot_product_flash_attention.h of cudnn-frontend 1.x, its workspace.
    Gradients of shared keys and values are whole for each head only in ragged layouts, which PyTorch does not use here.
    Unknown: the workspace of the chosen plan.
    """
    batch, heads, queries, head = args[1].shape
    return RESULTS, batch * heads * queries * (head + 1) * 4


def _cudnns(reached: float, query: int, traffic: float) -> Time:
    """Returns the time of a cuDNN kernel, by the share of the rate of products that it reaches in 16 bits.

    Since Hopper it pads the tokens of argument `query` to whole blocks, and moves `traffic` times its bytes afterwards.
    """
    usual = share(reached, reached)

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        found = usual(args, work, card)
        if not since_hopper(card):
            return found
        whole = whole_share(args[query], _CUDNN_TOKENS)
        return shared(found, whole)._replace(extra_bytes=round(traffic * work.nbytes))

    return time


def _rule(**more: Any) -> OpRule:
    return OpRule(flops=_flops, **more)


def _backward_rule(**more: Any) -> OpRule:
    return OpRule(flops=_flops_backward, **more)


RULES = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _rule(),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _backward_rule(batched=6),
    "aten._scaled_dot_product_flash_attention": _rule(time=share(0.9, 0.4)),
    "aten._scaled_dot_product_flash_attention_backward": _backward_rule(
        program=_flash_backward, time=share(0.75, 0.25)
    ),
    # Seeds lie on the host, except in a CUDA graph capture.
    "aten._scaled_dot_product_efficient_attention": _rule(
        program=_efficient_forward, on_host=(2, 3), time=share(0.5, 0.22, 0.55, tokens=(0, _EFFICIENT_TOKENS))
    ),
    "aten._scaled_dot_product_efficient_attention_backward": _backward_rule(
        program=_efficient_backward, time=share(0.4, 0.14, 0.52, tokens=(1, _EFFICIENT_TOKENS))
    ),
    "aten._scaled_dot_product_cudnn_attention": _rule(order=(2, 3, 0, 1), time=_cudnns(0.8, 0, 1.1)),
    "aten._scaled_dot_product_cudnn_attention_backward": _backward_rule(
        program=_cudnn_backward, time=_cudnns(0.7, 1, 2.1)
    ),
    "aten._scaled_dot_product_fused_attention_overrideable": _rule(),
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _backward_rule(),
}
