"""Cross entropy of lazy `F.linear` logits, in which the weight's gradient is computed by blocks of classes.

Summed over pieces of rows, the gradient of a 16-bit weight needs a 32-bit sum as well: three times its size. Here each
block of the weight's rows (classes) is one product over all rows of hidden states, accumulated in 32 bits inside the
kernel and rounded once, as in the untiled head. The price is a second product of the logits' size.

Forward goes by pieces of rows: logsumexp, loss and, if possible, the gradient of the hidden states. Backward goes by
blocks of classes, as many as there are pieces, so that the logits of a block are as large as those of a piece.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the loss from logsumexp and
the target's logit with logits recomputed in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from memscale.core import device_type
from memscale.transforms.tile.head import late
from memscale.transforms.tile.head.loss import ALL, Loss, LossAlgorithm, accumulator, scaled


def pay(loss: Loss, hidden: torch.Tensor) -> bool:
    """Whether a 32-bit sum of weight gradients would be larger than a piece's logits.

    Wider dtypes need no second sum; for them the answer is whether `late_gradient` is set and saves memory.
    """
    if loss.projection.linear is None or len(loss.ranges) < 2:
        return False
    weight, bias = loss.projection.linear
    if weight.element_size() != 2:
        has_bias = bias is not None and bias.requires_grad  # the bias's gradient comes from the same blocks at once
        return loss.projection.tiling.late_gradient and not has_bias and pays_late(loss, hidden)
    if not weight.requires_grad:
        return False
    sum_bytes = weight.numel() * accumulator(weight.dtype).itemsize
    return sum_bytes > loss.ranges[0][1] * weight.shape[0] * weight.element_size()


def pays_late(loss: Loss, hidden: torch.Tensor) -> bool:
    """Whether the weight's gradient would wait for the other gradients of the weight; see `late`."""
    assert loss.projection.linear is not None
    return late.pays(loss.projection.linear[0], hidden)


class ByBlocks(LossAlgorithm):
    """Computes forward by pieces of rows, and backward by blocks of classes.

    Args:
        loss: as in `LossAlgorithm`.
        reduction: as in `LossAlgorithm`.
        early: compute the gradient of the hidden states in forward, from the logits of the loss.
    """

    def __init__(self, loss: Loss, reduction: str, *, early: bool = False) -> None:
        super().__init__(loss, reduction)
        self.early = early
        self.hidden_grad: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = self.loss
        # With zero rows: gives the dtype of the result, and the errors for settings that do not fit.
        nothing = hidden.new_empty((0, loss.projection.width), dtype=loss.projection.dtype)
        dtype = loss.of_logits(nothing, target[:0], "none").dtype
        logsumexp = torch.empty(len(hidden), dtype=accumulator(dtype), device=hidden.device)
        divides = self.early and self.reduction == "mean"
        scale = 1 / loss.denominator(target).to(logsumexp.dtype) if divides else logsumexp.new_ones(())
        rows = LossRows(loss, target, logsumexp, scale)
        values = torch.where(rows.kept, self.values(rows, hidden), 0)
        if self.reduction != "none":
            values = values.sum() / loss.denominator(target) if self.reduction == "mean" else values.sum()
        return values.to(dtype), [logsumexp]

    def backward(
        self, grad: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor, saved: list[torch.Tensor], *, last: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        logsumexp = saved[0]
        scale = grad.to(logsumexp.dtype)
        if self.reduction == "mean":
            scale = scale / self.loss.denominator(target)
        rows = LossRows(self.loss, target, logsumexp, scale)
        if self.hidden_grad is None:
            return self.gradients(rows, hidden)
        return scaled(self.hidden_grad, grad, last=last), _gradients_of_linear(rows, hidden)

    def values(self, rows: LossRows, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the loss of every row, and fills in its logsumexp."""
        values = torch.empty_like(rows.logsumexp)
        if self.early and hidden.requires_grad:
            self.hidden_grad = torch.empty_like(hidden)
        for start, length in self.loss.ranges:
            _forward_piece(rows, hidden, slice(start, start + length), values, self.hidden_grad)
        return values

    def gradients(self, rows: LossRows, hidden: torch.Tensor) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Returns the gradient of the hidden states, and the gradients of weight and bias by the id of the tensor."""
        hidden_grad = torch.empty_like(hidden) if hidden.requires_grad else None
        if hidden_grad is not None:
            for start, length in self.loss.ranges:
                _backward_piece(rows, hidden, slice(start, start + length), hidden_grad)
        return hidden_grad, _gradients_of_linear(rows, hidden)


def _forward_piece(
    rows: LossRows, hidden: torch.Tensor, piece: slice, values: torch.Tensor, hidden_grad: torch.Tensor | None
) -> None:
    """Fills in logsumexp, loss and, if wanted, the gradient of the hidden states for a piece of the rows."""
    logits = rows.projection.product(hidden[piece])
    for part in _parts(logits):
        at = slice(piece.start + part.start, piece.start + part.stop)
        values[at] = rows.loss(logits[part], at, replace=hidden_grad is not None)
    if hidden_grad is not None:
        torch.mm(logits, rows.weight, out=hidden_grad[piece])


def _backward_piece(rows: LossRows, hidden: torch.Tensor, piece: slice, hidden_grad: torch.Tensor) -> None:
    """Fills in the gradient of the hidden states for a piece of the rows."""
    logits = rows.projection.product(hidden[piece])
    _turn_into_gradient(rows, logits, piece.start, ALL)
    torch.mm(logits, rows.weight, out=hidden_grad[piece])


def _gradients_of_linear(rows: LossRows, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
    """Returns the gradients of weight and bias by the id of the tensor."""
    weight, bias = rows.weight, rows.bias
    if rows.late and rows.bias_gradient() is None:
        return {id(weight): late.late_gradient(weight, hidden, partial(_fill, rows, hidden, None))}
    weight_grad, bias_grad = torch.empty_like(weight), rows.bias_gradient()
    _fill(rows, hidden, bias_grad, weight_grad, add=False)
    return {id(weight): weight_grad, **({} if bias_grad is None else {id(bias): bias_grad})}


def _fill(
    rows: LossRows, hidden: torch.Tensor, bias_grad: torch.Tensor | None, weight_grad: torch.Tensor, *, add: bool
) -> None:
    """Writes the gradient of the weight, or adds it, and writes the gradient of the bias."""
    for classes in rows.blocks():
        logits = rows.projection.product(hidden, classes)
        _turn_into_gradient(rows, logits, 0, classes)
        put_product(logits.t(), hidden, weight_grad[classes], add=add)
        if bias_grad is not None:
            torch.sum(logits, 0, out=bias_grad[classes])
        del logits  # otherwise it would live at the same time as the next block's


def put_product(left: torch.Tensor, right: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
    """Writes ``left @ right`` to `target`, or adds it after rounding, as autograd adds two gradients."""
    if add:
        target += torch.mm(left, right)
    else:
        torch.mm(left, right, out=target)


# How many 32-bit numbers exist at a time; the rest of a piece is 16-bit. On a CPU few enough to stay in the cache
# between pointwise operators, elsewhere enough to be worth a kernel launch.
_CPU_PART_NUMEL = 2**19
_PART_NUMEL = 2**24


def _parts(logits: torch.Tensor) -> list[slice]:
    """Cuts the rows of `logits` into parts, of at least one row per thread, as kernels over classes split by rows."""
    on_cpu = device_type(logits) == "cpu"
    few = (_CPU_PART_NUMEL if on_cpu else _PART_NUMEL) // max(logits.shape[1], 1)
    length = max(few, torch.get_num_threads() if on_cpu else 1)
    return [slice(start, min(start + length, len(logits))) for start in range(0, len(logits), length)]


class LossRows:
    """The terms of each row's loss ``total * logsumexp(z) - sum(q * z)``, where `total` is the sum of the row's `q`.

    `q` is the class weight times the target distribution: ``1 - label_smoothing`` at the target (`own`, shape [rows]),
    and ``label_smoothing / classes`` at every class (`smooth`, shape [classes]). It is zero for ignored rows. The
    gradient of a row's logits is `scale` times ``total * softmax(z) - q``.
    """

    def __init__(self, loss: Loss, target: torch.Tensor, logsumexp: torch.Tensor, scale: torch.Tensor) -> None:
        assert loss.projection.linear is not None
        self.projection, self.pieces = loss.projection, len(loss.ranges)
        self.weight, self.bias = loss.projection.linear
        self.late = loss.late
        self._after_steps = loss.after_steps
        self.logsumexp = logsumexp
        self.kept = target != loss.ignore_index
        kept = self.kept.to(logsumexp.dtype)
        self.target = torch.where(self.kept, target, 0).long()
        # `where`, not a product with zero: if all rows are ignored, the scale of a mean is infinite.
        self.scale = torch.where(self.kept, scale.to(logsumexp.dtype), 0)
        class_weight = None if loss.class_weight is None else loss.class_weight.to(logsumexp.dtype)
        self.own = kept * (1 - loss.label_smoothing)
        if class_weight is not None:
            self.own = self.own * class_weight[self.target]
        self.total, self.smooth = self.own, None
        if loss.label_smoothing:
            even = loss.label_smoothing / loss.projection.width
            self.smooth = even * (logsumexp.new_ones(loss.projection.width) if class_weight is None else class_weight)
            self.total = self.own + kept * self.smooth.sum()

    def blocks(self) -> Iterator[slice]:
        """Yields the classes in as many blocks as there are pieces."""
        count = min(self.pieces, len(self.weight))
        for start, stop in pairwise(index * len(self.weight) // count for index in range(count + 1)):
            yield slice(start, stop)

    def bias_gradient(self) -> torch.Tensor | None:
        """Returns memory for the gradient of the bias, or None if the bias needs none."""
        return None if self.bias is None or not self.bias.requires_grad else torch.empty_like(self.bias)

    def loss(self, logits: torch.Tensor, at: slice, *, replace: bool) -> torch.Tensor:
        """Returns the loss of the rows `at` and fills in their logsumexp; `replace` puts gradients over the logits."""
        z, leaf = self._stepped(logits)
        largest = z.detach().amax(-1, keepdim=True)
        exps = z.detach() - largest
        # From the differences to the largest logit: a loss of 1e-6 would be lost in a difference of numbers near 50.
        expected = self.own[at] * exps.gather(-1, self.target[at, None]).squeeze(-1)
        if self.smooth is not None:
            expected += (exps * self.smooth).sum(-1)
        total = exps.exp_().sum(-1)
        self.logsumexp[at] = total.log() + largest.squeeze(-1)
        if replace:
            self._put_gradient(logits, z, leaf, exps, 1 / total, at, ALL)
        return self.total[at] * total.log() - expected

    def turn_into_gradient(self, logits: torch.Tensor, at: slice, classes: slice) -> None:
        """Overwrites the logits of the rows `at` by their gradient."""
        z, leaf = self._stepped(logits, classes)
        exps = (z.detach() - self.logsumexp[at, None]).exp_()
        self._put_gradient(logits, z, leaf, exps, 1, at, classes)

    def position(self, classes: slice, at: slice = ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the index of each target within the block as a column, and whether it is inside; else any index."""
        start, stop, _ = classes.indices(self.projection.width)
        exact = self.target[at] - start
        position = exact.clamp(0, stop - start - 1)
        return position[:, None], position == exact

    def _stepped(self, logits: torch.Tensor, classes: slice = ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits after the casts and scalings, in at least 32 bits, and the leaf of their graph."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            z = self._after_steps(leaf, classes)
            return z.to(accumulator(z.dtype)), leaf

    def _put_gradient(
        self,
        logits: torch.Tensor,
        z: torch.Tensor,
        leaf: torch.Tensor,
        exps: torch.Tensor,
        factor: Any,
        at: slice,
        classes: slice,
    ) -> None:
        """Overwrites `logits` by the gradient of the rows `at`; ``exps * factor`` is their softmax, and is consumed."""
        scale = self.scale[at]
        exps *= (self.total[at] * scale * factor)[:, None]
        if self.smooth is not None:
            exps.addr_(scale, self.smooth[classes], alpha=-1)
        position, inside = self.position(classes, at)
        exps.scatter_add_(1, position, torch.where(inside, self.own[at] * -scale, 0)[:, None])
        logits.copy_(torch.autograd.grad(z, leaf, exps)[0])


def _turn_into_gradient(rows: LossRows, logits: torch.Tensor, first_row: int, classes: slice) -> None:
    """Overwrites the logits of some classes, for the rows from `first_row` on, by their gradient."""
    for part in _parts(logits):
        rows.turn_into_gradient(logits[part], slice(first_row + part.start, first_row + part.stop), classes)
