"""Cross entropy of lazy logits, piece by piece: the whole logits never exist, in forward or in backward.

For a scalar loss the gradient of each piece is computed right after its loss, from the same logits, so backward
recomputes nothing and the work is that of the plain head. The price is that the gradients of the hidden states and of
the weight live from forward to backward. Where this is impossible (an unreduced loss, class probabilities, a backward
that is itself differentiated), the rows are tiled with recomputation. Where the sum of weight gradients would be most
of the memory, the classes are tiled as well (`class_blocks`).
"""

from __future__ import annotations

from typing import Any

import torch

from memscale.core import device_type
from memscale.transforms.tile.head import accelerated, class_blocks
from memscale.transforms.tile.head.loss import Loss, LossAlgorithm, Step, accumulator, in_one_node, scaled
from memscale.transforms.tile.head.projection import Projection


def cross_entropy(
    projection: Projection,
    steps: tuple[Step, ...],
    hidden: torch.Tensor,
    shape: torch.Size,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes `F.cross_entropy`, with the same arguments and meaning, of the logits of `hidden` after `steps`.

    Args:
        shape: the shape of the logits, ``[rows, classes]`` or ``[batch, classes, length]``.

    Returns:
        The loss, or `NotImplemented`, before any effect, for arguments that are not supported.
    """
    rows = hidden.shape[:-1]
    plain = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    fits = target.shape == rows or (target.is_floating_point() and target.shape == shape)
    if not plain or not fits:
        return NotImplemented
    projection.check()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if target.is_floating_point() and len(shape) == 3:
        target = target.transpose(1, 2)
    flat_target = target.reshape(hidden.shape[0], -1) if target.is_floating_point() else target.reshape(-1)
    loss = Loss(projection, steps, projection.tiling.ranges(hidden.shape[0]), weight, ignore_index, label_smoothing)
    # Gradients computed in forward are not multiplied by a loss scale yet, and those of float16 would underflow.
    in_forward = reduction != "none" and projection.dtype != torch.float16
    differentiated = bool(loss.ranges) and projection.requires_grad and torch.is_grad_enabled()
    if not differentiated or target.is_floating_point():
        value = loss.by_rows(hidden, flat_target, reduction)
    elif class_blocks.pay(loss, hidden):
        loss.late = class_blocks.pays_late(loss, hidden)
        algorithm = class_blocks.ByBlocks(loss, reduction, early=in_forward)
        if accelerated.takes(loss, hidden):
            algorithm = accelerated.ByClasses(loss, reduction)
        value = in_one_node(algorithm, hidden, flat_target)
    elif in_forward:
        value = in_one_node(InForward(loss, reduction), hidden, flat_target)
    else:
        value = loss.by_rows(hidden, flat_target, reduction)
    return value.reshape(rows if reduction == "none" else ())


class InForward(LossAlgorithm):
    """A mean or sum whose gradients are computed in forward, one piece of the rows at a time."""

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss, captured = self.loss, self.loss.projection.captured
        # `1 / count` would have the default dtype, which may have 16 bits.
        wide = accumulator(loss.projection.dtype)
        scale = 1 / loss.denominator(target).to(wide) if self.reduction == "mean" else None
        run, shown = _linear_piece, loss
        if loss.projection.linear is None:
            # Without views, a captured tensor computed from another (as a hypernetwork's for `functional_call`) would
            # be differentiated through it.
            run, shown = _piece, loss if all(tensor.is_leaf for tensor in captured) else loss.of_views()
        self._wanted = [id(tensor) for tensor in captured if tensor.requires_grad]
        gradients = _Gradients(hidden, [tensor for tensor in shown.projection.captured if tensor.requires_grad])
        total: torch.Tensor | None = None
        for start, length in loss.ranges:
            rows = slice(start, start + length)
            value = run(shown, hidden[rows], target[rows], scale, gradients, rows)
            total = value.to(accumulator(value.dtype)) + (0 if total is None else total)
            dtype = value.dtype
        assert total is not None
        gradients.round_sums()
        self._gradients = gradients
        return (total if scale is None else total / loss.denominator(target)).to(dtype), []

    def backward(
        self, grad: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor, saved: list[torch.Tensor], *, last: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        hidden_grad, found = self._gradients.hidden, self._gradients.of_captured()
        if hidden_grad is not None:
            hidden_grad = scaled(hidden_grad, grad, last=last)
        return hidden_grad, dict(zip(self._wanted, [scaled(each, grad, last=last) for each in found], strict=True))


class _Gradients:
    """The gradients of the hidden states and of the captured tensors, filled in piece by piece.

    The gradients of captured tensors are sums over all pieces, accumulated in at least 32 bits.
    """

    def __init__(self, hidden: torch.Tensor, captured: list[torch.Tensor]) -> None:
        self.hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        self.captured = captured
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Adds one piece's gradient of captured tensor `index`."""
        if index in self._sums:
            self._sums[index].add_(grad)
        else:
            self._sums[index] = grad.to(accumulator(grad.dtype))

    def add_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds ``left @ right`` to the gradient of captured tensor `index`."""
        if index not in self._sums:
            self._sums[index] = torch.zeros(
                self.captured[index].shape, dtype=accumulator(left.dtype), device=left.device
            )
        total = self._sums[index]
        if total.dtype == left.dtype:
            total.addmm_(left, right)
            return
        # A product in 16 bits would be rounded before it is added, so it is made in 32 bits, in blocks of rows, so that
        # no 32-bit copy of the whole exists in addition to the sum.
        on_cuda = device_type(left) == "cuda"
        right = right if on_cuda else right.to(total.dtype)
        for start in range(0, left.shape[0], _SUM_ROWS):
            rows = slice(start, start + _SUM_ROWS)
            if on_cuda:
                total[rows] += torch.mm(left[rows], right, out_dtype=total.dtype)
            else:
                total[rows].addmm_(left[rows].to(total.dtype), right)

    def round_sums(self) -> None:
        """Called after the last piece: casts each gradient to the dtype of its tensor."""
        for index, tensor in enumerate(self.captured):  # one by one, so that each sum is freed before the next cast
            self._sums[index] = self._sums[index].to(tensor.dtype)

    def of_captured(self) -> list[torch.Tensor]:
        """Returns the gradients of the captured tensors."""
        return [self._sums[index] for index in range(len(self.captured))]


_SUM_ROWS = 4096


def _piece(
    loss: Loss, hidden: torch.Tensor, target: torch.Tensor, scale: Any, gradients: _Gradients, rows: slice
) -> torch.Tensor:
    """Returns the loss of one piece of any projection, and adds its gradients, computed by autograd."""
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_(gradients.hidden is not None)
        value = loss.of_logits(loss.projection(leaf), target, "sum")
        inputs = [*([leaf] if leaf.requires_grad else []), *gradients.captured]
        found = list(torch.autograd.grad(value, inputs, scale, allow_unused=True, materialize_grads=True))
    if gradients.hidden is not None:
        gradients.hidden[rows] = found.pop(0)
    for index, grad in enumerate(found):
        gradients.add(index, grad)
    return value.detach()


def _linear_piece(
    loss: Loss, hidden: torch.Tensor, target: torch.Tensor, scale: Any, gradients: _Gradients, rows: slice
) -> torch.Tensor:
    """Returns the loss of one piece of `F.linear`, and adds its products directly to the sums."""
    assert loss.projection.linear is not None
    weight, _ = loss.projection.linear
    logits = loss.projection.product(hidden)
    with torch.enable_grad():
        value = loss.of_logits(logits.requires_grad_(), target, "sum")
        (grad,) = torch.autograd.grad(value, logits, scale)
    del logits
    if gradients.hidden is not None:
        torch.mm(grad, weight, out=gradients.hidden[rows])
    for index, tensor in enumerate(gradients.captured):
        if tensor is weight:
            gradients.add_product(index, grad.t(), hidden)
        else:
            gradients.add(index, grad.sum(0))
    return value.detach()
