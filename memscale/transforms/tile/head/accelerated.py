"""Cross entropy of lazy 16-bit `F.linear` logits on an accelerator: forward and backward go through blocks of classes.

The row-wise algorithm in `class_blocks` is slow on a GPU: each piece reads the whole weight for a few rows of hidden
states, and launches every operator. Here forward computes the logsumexp of all rows block by block of classes. Backward
computes both gradients from the same block of logits: large products that keep the device busy, and two passes over a
block for its gradient, because each row's factor is added to the exponent: ``f * exp(z - lse) = exp(z - lse + log f)``.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for a logsumexp by blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from memscale.core import compute_capability, device_type
from memscale.transforms.tile.head import late
from memscale.transforms.tile.head.class_blocks import ByBlocks, LossRows, put_product
from memscale.transforms.tile.head.loss import Loss


def takes(loss: Loss, hidden: torch.Tensor) -> bool:
    """Whether `ByClasses` applies: on an accelerator, for unmodified 16-bit logits, with class indices as targets."""
    if device_type(hidden) in ("cpu", "meta") or hidden.element_size() != 2:
        return False
    if not loss.only_widens or loss.label_smoothing:
        return False
    # Before sm_80 PyTorch has no product of bfloat16 matrices with a 32-bit result.
    return hidden.dtype != torch.bfloat16 or (compute_capability(hidden) or (8, 0)) >= (8, 0)


class ByClasses(ByBlocks):
    """Computes forward and backward by blocks of classes."""

    def values(self, rows: LossRows, hidden: torch.Tensor) -> torch.Tensor:
        return _loss(rows, hidden)

    def gradients(self, rows: LossRows, hidden: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        return _gradients(rows, hidden)


def _loss(rows: LossRows, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the loss of every row, and fills in its logsumexp."""
    blocks = list(rows.blocks())
    largest, total = rows.logsumexp.new_empty((2, len(blocks), len(hidden)))
    own = torch.full_like(rows.logsumexp, -torch.inf)
    rows.weight[:, 0].gather(0, rows.target)  # raises for a target out of range, as the untiled head does
    for index, classes in enumerate(blocks):
        logits = rows.projection.product(hidden, classes)
        position, inside = rows.position(classes)
        own = torch.where(inside, logits.gather(1, position).squeeze(1), own)
        # Clamped to a finite number: if all classes of the block are masked, -inf - -inf would be NaN.
        largest[index] = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
        exps = logits - largest[index, :, None]
        del logits
        torch.sum(exps.exp_(), 1, out=total[index])
        del exps  # otherwise it would live at the same time as the next block's logits
    most = largest.amax(0)
    log = (total * (largest - most).exp_()).sum(0).log()
    torch.add(log, most, out=rows.logsumexp)
    # `logsumexp - own` would lose a loss of 1e-6 in the difference of two numbers near 50.
    loss: torch.Tensor = rows.own * (log - (own - most))
    return loss


def _gradients(rows: LossRows, hidden: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
    """Returns the gradient of the hidden states, and the gradients of weight and bias by the id of the tensor."""
    weight, bias, sign = rows.weight, rows.bias, _sign(rows, hidden)
    hidden_grad: torch.Tensor | None = None
    weight_grad = None if rows.late else torch.empty_like(weight)
    bias_grad = rows.bias_gradient()
    signed = hidden * sign[:, None]
    for classes, logits in _gradients_of_logits(rows, hidden):
        if weight_grad is not None:
            torch.mm(logits.t(), signed, out=weight_grad[classes])
        if hidden.requires_grad:
            part = torch.mm(logits, weight[classes], out_dtype=rows.logsumexp.dtype)
            hidden_grad = part if hidden_grad is None else hidden_grad.add_(part)
            del part
        if bias_grad is not None:
            torch.mv(logits.t(), sign, out=bias_grad[classes])
        del logits
    if hidden_grad is not None:
        hidden_grad = hidden_grad.to(hidden.dtype).mul_(sign[:, None])
    if weight_grad is None:
        weight_grad = late.late_gradient(weight, hidden, partial(_fill, rows, hidden))
    return hidden_grad, {id(weight): weight_grad, **({} if bias_grad is None else {id(bias): bias_grad})}


def _fill(rows: LossRows, hidden: torch.Tensor, weight_grad: torch.Tensor, *, add: bool) -> None:
    """Writes the gradient of the weight to `weight_grad`, or adds it."""
    signed = hidden * _sign(rows, hidden)[:, None]
    for classes, logits in _gradients_of_logits(rows, hidden):
        put_product(logits.t(), signed, weight_grad[classes], add=add)
        del logits


def _gradients_of_logits(rows: LossRows, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields blocks of classes with the gradient of their logits, without the sign of each row's factor."""
    share = (rows.own * rows.scale).abs()
    shift = (rows.logsumexp - share.log())[:, None]
    for classes in rows.blocks():
        logits = rows.projection.product(hidden, classes)
        position, inside = rows.position(classes)
        exponents = logits - shift
        own = exponents.gather(1, position).exp_() - (share * inside)[:, None]
        torch.exp(exponents, out=logits)
        del exponents
        logits.scatter_(1, position, own.to(logits.dtype))
        yield classes, logits
        del logits  # otherwise it would live at the same time as the next block


def _sign(rows: LossRows, hidden: torch.Tensor) -> torch.Tensor:
    return (rows.own * rows.scale).sign().to(hidden.dtype)
