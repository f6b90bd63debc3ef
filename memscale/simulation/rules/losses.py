"""Softmaxes and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memscale.simulation.rules.layouts import ordered_as, whole_storage
from memscale.simulation.rules.reductions import ALL_SUM, reduced
from memscale.simulation.rules.rule import PLAIN, RESULTS, CardTraits, OpRule, Program, copied, copy_after, taken
from memscale.simulation.rules.times import passes, passes_of_rows


def _log_softmax_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``host_softmax_backward`` in aten/src/ATen/native/cuda/SoftMax.cu."""
    return RESULTS, *taken(copied(args[0]), copied(args[1]))


def _softmax_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the product of gradient and output, which the kernel takes in place of the gradient.

    Source: ``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu.
    """
    product = torch.mul(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in args[:2]))
    return RESULTS, *taken(product.nbytes, copied(product), copied(args[1]))


def _safe_softmax(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of ``_safe_softmax``: masks of infinite scores and of wholly infinite rows, and a zero.

    Source: ``_safe_softmax`` in aten/src/ATen/native/transformers/attention.cpp.
    """
    scores = args[0]
    return RESULTS, *taken(scores.numel(), scores.numel() // max(1, scores.size(args[1])), 4)


def _mean_loss(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the elementwise loss that a mean or a sum reduces, and of that reduction.

    Source: aten/src/ATen/native/BinaryOps.cpp and PointwiseOps.cpp, the structured kernels of these losses.
    """
    x = args[0]
    reduction = next((each for each in args[2:] if isinstance(each, int) and not isinstance(each, bool)), 1)
    if not reduction:
        return PLAIN
    each = torch.empty(torch.broadcast_shapes(x.shape, args[1].shape), dtype=x.dtype, device="meta")
    total = torch.empty((), dtype=x.dtype, device="meta")
    scratch = reduced(ALL_SUM, (each,), total, card)
    return RESULTS, each.nbytes, *scratch


def _margin_loss(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``soft_margin_loss_out`` in aten/src/ATen/native/Loss.cpp: temporaries of the result, and their sum."""
    if (args[2] if len(args) > 2 else 1) == 0:
        return PLAIN
    total = torch.empty((), dtype=args[0].dtype, device="meta")
    return RESULTS, total.itemsize, *reduced(ALL_SUM, (args[0],), total, card)


def _margin_loss_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``soft_margin_loss_backward_out``: the exponential of a product, then the divisor."""
    each = args[1].nbytes
    return RESULTS, each, each, -each, each


def _multi_margin_loss(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``multi_margin_loss_cuda_out`` in aten/src/ATen/native/cuda/MultiMarginLoss.cu."""
    rows = args[0].size(0) * args[0].itemsize if args[0].dim() > 1 else 0
    reduces = args[5] if len(args) > 5 else 1
    return RESULTS, *taken(rows if reduces else 0)


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0)  # CPUs alone allocate a buffer


def _multi_margin_result(
    x: torch.Tensor, target: torch.Tensor, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    return x.new_empty(()) if reduction or x.dim() < 2 else x.new_empty(x.size(0))


def _margin_gradient(grad: torch.Tensor, x: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


RULES = {
    "aten._softmax": OpRule(program=copy_after, scratch="copies", time=passes_of_rows(1.9, 1.7)),
    "aten._log_softmax": OpRule(program=copy_after, scratch="copies", time=passes_of_rows(1.8, 1.5)),
    "aten._softmax_backward_data": OpRule(program=_softmax_backward, scratch="copies", time=passes_of_rows(2.1, 1.9)),
    "aten._log_softmax_backward_data": OpRule(
        program=_log_softmax_backward, layout=ordered_as(), scratch="copies", time=passes_of_rows(1.3, 1.3)
    ),
    "aten._safe_softmax": OpRule(program=_safe_softmax, time=passes(3.2, 3.2)),
    "aten.nll_loss2d_forward": OpRule(order=(1, 0), scratch="copies"),
    **{f"aten.nll_loss{kind}": OpRule(scratch="copies") for kind in ("_forward", "_backward", "2d_backward")},
    "aten.mse_loss": OpRule(program=_mean_loss, layout=whole_storage, batched=2),
    "aten.smooth_l1_loss": OpRule(program=_mean_loss, layout=whole_storage, batched=2),
    "aten.binary_cross_entropy": OpRule(program=_mean_loss, layout=whole_storage),
    "aten.huber_loss": OpRule(program=_mean_loss, batched=2),
    "aten.mse_loss_backward": OpRule(layout=ordered_as()),
    "aten.smooth_l1_loss_backward": OpRule(layout=ordered_as()),
    "aten.huber_loss_backward": OpRule(layout=ordered_as()),
    "aten.soft_margin_loss": OpRule(program=_margin_loss, layout=whole_storage),
    "aten.soft_margin_loss_backward": OpRule(program=_margin_loss_backward),
    "aten.multi_margin_loss": OpRule(program=_multi_margin_loss, results=_multi_margin_result),
    "aten.multi_margin_loss_backward": OpRule(results=_margin_gradient),
    "aten.log_sigmoid_forward": OpRule(results=_log_sigmoid, layout=ordered_as()),
    "aten.binary_cross_entropy_with_logits": OpRule(composed_on=("cuda",)),
}
