"""Cross entropy of lazy `F.linear` logits, in which the weight's gradient is computed by blocks of classes.

Summed over pieces of rows, the gradient of a 16-bit weight needs a 32-bit sum as well: three times its size. Here each
block of the weight's rows (classes) is one product over all rows of hidden states, accumulated in 32 bits inside the
kernel and rounded once, as in the untiled head. The price is a second product of the logits' size. There are as many
blocks as pieces, so that the logits of a block are as large as those of a piece.

The loss and the gradient of the hidden states are computed in one of two orders:

- by pieces of rows, the gradient right after the loss of a piece if possible (`LossRows`);
- for unmodified logits on a GPU by blocks of classes as well (`SignedRows`), because pieces of rows are slow there:
  each reads the whole weight for a few rows, and launches every operator.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the loss from logsumexp and
the target's logit with logits recomputed in blocks; Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018), for a logsumexp by blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch

from memscale.core import compute_capability, device_type
from memscale.transforms.tile.head import late
from memscale.transforms.tile.head.loss import ALL, Loss, LossAlgorithm, accumulator, scaled


def by_classes(loss: Loss, hidden: torch.Tensor, reduction: str, *, early: bool) -> ByClasses | None:
    """Returns the algorithm if it saves memory: for trainable 16-bit weights, and for late gradients."""
    if loss.projection.linear is None or len(loss.ranges) < 2:
        return None
    weight, bias = loss.projection.linear
    if not weight.requires_grad:
        return None
    # The logits of a piece are as large as the sum of 16-bit gradients in 32 bits.
    large = loss.ranges[0][1] >= 2 * weight.shape[1]
    has_bias = bias is not None and bias.requires_grad  # by rows its gradient comes from the blocks of the weight's
    if weight.element_size() != 2:  # wider dtypes need no second sum
        waits = loss.projection.tiling.late_gradient and not has_bias and late.pays(weight, hidden)
        return ByClasses(loss, reduction, LossRows, early=early, waits=True) if waits else None
    rows: type[LossRows] = LossRows
    if has_wide_products(hidden):
        unmodified = loss.only_widens and not loss.label_smoothing
        # In large pieces a sum takes less time than passes in 32 bits over 16-bit logits, or two over modified ones.
        if large and not (unmodified and loss.steps):
            return None
        rows = SignedRows if unmodified else LossRows
    # A late gradient makes each block's logits once more, on a GPU: no saving where these are large.
    waits = not large and not (has_bias and rows is LossRows) and late.pays(weight, hidden)
    return ByClasses(loss, reduction, rows, early=early and rows is LossRows, waits=waits)


def has_wide_products(hidden: torch.Tensor) -> bool:
    """Whether products of the 16-bit matrices of a device can have 32-bit results."""
    if device_type(hidden) in ("cpu", "meta"):
        return False
    # PyTorch has none of bfloat16 before sm_80.
    return hidden.dtype != torch.bfloat16 or (compute_capability(hidden) or (8, 0)) >= (8, 0)


class ByClasses(LossAlgorithm):
    """Computes the gradients of weight and bias by blocks of classes in backward.

    Args:
        loss: as in `LossAlgorithm`.
        reduction: as in `LossAlgorithm`.
        rows: how the losses of rows and the gradients of their logits are computed.
        early: compute the gradient of the hidden states in forward, from the logits of the loss.
        waits: compute the gradient of the weight when backward has the weight's other gradients.
    """

    def __init__(self, loss: Loss, reduction: str, rows: type[LossRows], *, early: bool, waits: bool) -> None:
        super().__init__(loss, reduction)
        assert loss.projection.linear is not None
        self.weight, self.bias = loss.projection.linear
        self.rows, self.early, self.waits = rows, early, waits
        self.hidden_grad: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = self.loss
        # With zero rows: gives the dtype of the result, and the errors for settings that do not fit.
        nothing = hidden.new_empty((0, loss.projection.width), dtype=loss.projection.dtype)
        dtype = loss.of_logits(nothing, target[:0], "none").dtype
        logsumexp = torch.empty(len(hidden), dtype=accumulator(dtype), device=hidden.device)
        divides = self.early and self.reduction == "mean"
        scale = 1 / loss.denominator(target).to(logsumexp.dtype) if divides else logsumexp.new_ones(())
        rows = self.rows(loss, target, logsumexp, scale)
        if self.early and hidden.requires_grad:
            self.hidden_grad = torch.empty_like(hidden)
        values = torch.where(rows.kept, rows.losses(hidden, self.hidden_grad), 0)
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
        rows = self.rows(self.loss, target, logsumexp, scale)
        hidden_grad: torch.Tensor | None = None
        sums: list[torch.Tensor] | None = None  # the sum over blocks so far, if any
        if self.hidden_grad is not None:
            hidden_grad = scaled(self.hidden_grad, grad, last=last)
        elif hidden.requires_grad and isinstance(rows, SignedRows):
            sums = []
        elif hidden.requires_grad:
            hidden_grad = rows.hidden_gradient(hidden)
        bias_grad = torch.empty_like(self.bias) if self.bias is not None and self.bias.requires_grad else None
        weight_grad = None if self.waits else torch.empty_like(self.weight)
        if weight_grad is not None or isinstance(rows, SignedRows):
            _fill(rows, hidden, weight_grad, bias_grad=bias_grad, sums=sums)
        if sums and isinstance(rows, SignedRows):
            hidden_grad = sums.pop().to(hidden.dtype).mul_(rows.sign[:, None])
        if weight_grad is None:
            weight_grad = late.late_gradient(self.weight, hidden, partial(_fill, rows, hidden))
        return hidden_grad, {id(self.weight): weight_grad} | ({} if bias_grad is None else {id(self.bias): bias_grad})


def _fill(
    rows: LossRows,
    hidden: torch.Tensor,
    weight_grad: torch.Tensor | None,
    *,
    add: bool = False,
    bias_grad: torch.Tensor | None = None,
    sums: list[torch.Tensor] | None = None,
) -> None:
    """Writes the gradients of weight (or adds it) and bias, and adds that of the hidden states, unsigned, to `sums`."""
    signed = rows.signed(hidden)
    for classes in rows.blocks():
        logits = rows.gradient_of_logits(hidden, 0, classes)
        if weight_grad is not None and add:
            weight_grad[classes].add_(torch.mm(logits.t(), signed))  # after rounding, as autograd adds two gradients
        elif weight_grad is not None:
            torch.mm(logits.t(), signed, out=weight_grad[classes])
        if sums is not None:
            part = torch.mm(logits, rows.weight[classes], out_dtype=rows.logsumexp.dtype)
            sums[:] = [sums[0].add_(part) if sums else part]
            del part
        if bias_grad is not None:
            rows.sum_signed(logits, out=bias_grad[classes])
        del logits  # otherwise it would live at the same time as the next block's


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
        self.projection, self.ranges = loss.projection, loss.ranges
        self.weight, _ = loss.projection.linear
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
        count = min(len(self.ranges), len(self.weight))
        for start, stop in pairwise(index * len(self.weight) // count for index in range(count + 1)):
            yield slice(start, stop)

    def losses(self, hidden: torch.Tensor, hidden_grad: torch.Tensor | None) -> torch.Tensor:
        """Returns the loss of every row, fills in its logsumexp and, if wanted, the gradient of the hidden states."""
        values = torch.empty_like(self.logsumexp)
        for start, length in self.ranges:
            logits = self.projection.product(hidden[start : start + length])
            for part in _parts(logits):
                at = slice(start + part.start, start + part.stop)
                values[at] = self._loss(logits[part], at, replace=hidden_grad is not None)
            if hidden_grad is not None:
                torch.mm(logits, self.weight, out=hidden_grad[start : start + length])
            del logits  # otherwise it would live at the same time as the next piece's
        return values

    def hidden_gradient(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the hidden states."""
        gradient = torch.empty_like(hidden)
        for start, length in self.ranges:
            logits = self.gradient_of_logits(hidden[start : start + length], start, ALL)
            torch.mm(logits, self.weight, out=gradient[start : start + length])
            del logits
        return gradient

    def _loss(self, logits: torch.Tensor, at: slice, *, replace: bool) -> torch.Tensor:
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

    def gradient_of_logits(self, hidden: torch.Tensor, first_row: int, classes: slice) -> torch.Tensor:
        """Returns the gradient of the logits of `hidden`, the rows from `first_row` on, for some classes."""
        logits = self.projection.product(hidden, classes)
        for part in _parts(logits):
            at, rows = slice(first_row + part.start, first_row + part.stop), logits[part]
            z, leaf = self._stepped(rows, classes)
            exps = (z.detach() - self.logsumexp[at, None]).exp_()
            self._put_gradient(rows, z, leaf, exps, 1, at, classes)
            del z, leaf, exps
        return logits

    def signed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden` times the signs that `gradient_of_logits` leaves out, of which there are none."""
        return hidden

    def sum_signed(self, logits: torch.Tensor, *, out: torch.Tensor) -> None:
        """Writes the sum over the rows of a gradient of logits to `out`."""
        torch.sum(logits, 0, out=out)

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


class SignedRows(LossRows):
    """`LossRows` of unmodified 16-bit logits on a GPU, by blocks of classes, whose gradients leave out a row's sign.

    Two passes over a block compute its gradient, as the row's factor is in the exponent:
    ``f * exp(z - lse) = exp(z - lse + log f)``.
    """

    def blocks(self) -> Iterator[slice]:
        # Tensor cores multiply 16-bit matrices whose rows begin at multiples of 16 bytes; other kernels are slower.
        size = -(-len(self.weight) // (8 * len(self.ranges))) * 8
        for start in range(0, len(self.weight), size):
            yield slice(start, min(start + size, len(self.weight)))

    def losses(self, hidden: torch.Tensor, hidden_grad: torch.Tensor | None) -> torch.Tensor:
        assert hidden_grad is None
        blocks = list(self.blocks())
        largest, total = self.logsumexp.new_empty((2, len(blocks), len(hidden)))
        own = torch.full_like(self.logsumexp, -torch.inf)
        self.weight[:, 0].gather(0, self.target)  # raises for a target out of range, as the untiled head does
        for index, classes in enumerate(blocks):
            logits = self.projection.product(hidden, classes)
            position, inside = self.position(classes)
            own = torch.where(inside, logits.gather(1, position).squeeze(1), own)
            # Clamped to a finite number: if all classes of the block are masked, -inf - -inf would be NaN.
            largest[index] = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
            exps = logits - largest[index, :, None]
            del logits
            torch.sum(exps.exp_(), 1, out=total[index])
            del exps  # otherwise it would live at the same time as the next block's logits
        most = largest.amax(0)
        log = (total * (largest - most).exp_()).sum(0).log()
        torch.add(log, most, out=self.logsumexp)
        # `logsumexp - own` would lose a loss of 1e-6 in the difference of two numbers near 50.
        loss: torch.Tensor = self.own * (log - (own - most))
        return loss

    @cached_property
    def _share(self) -> torch.Tensor:
        """The size of each row's factor."""
        return (self.own * self.scale).abs()

    @cached_property
    def _shift(self) -> torch.Tensor:
        return (self.logsumexp - self._share.log())[:, None]

    @cached_property
    def sign(self) -> torch.Tensor:
        """The sign of each row's factor, in the dtype of the weight."""
        return (self.own * self.scale).sign().to(self.weight.dtype)

    def gradient_of_logits(self, hidden: torch.Tensor, first_row: int, classes: slice) -> torch.Tensor:
        logits = self.projection.product(hidden, classes)
        position, inside = self.position(classes)
        exponents = logits - self._shift
        own = exponents.gather(1, position).exp_() - (self._share * inside)[:, None]
        torch.exp(exponents, out=logits)
        return logits.scatter_(1, position, own.to(logits.dtype))

    def signed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.sign[:, None]

    def sum_signed(self, logits: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.mv(logits.t(), self.sign, out=out)
