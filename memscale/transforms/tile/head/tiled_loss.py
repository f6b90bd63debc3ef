"""Cross entropy of lazy logits, piece by piece: the whole logits never exist, in forward or in backward.

A loss is computed in one of two ways:

- By rows: pieces of the rows of any head. For a scalar loss the gradient of each piece is computed right after its
  loss, from the same logits (`InForward`), so backward recomputes nothing and the work is that of the plain head; the
  gradients of the hidden states and of the weight live from forward to backward. Where this is impossible (an
  unreduced loss, class probabilities, float16, a backward that is itself differentiated), backward recomputes
  (`Loss.by_rows`).
- By classes (`class_blocks`): the gradient of an `nn.Linear` is computed by blocks of its classes where the sum of the
  weight gradients of pieces would be most of the memory, or where the weight's gradient is to be computed last.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memscale.transforms.tile.head.class_blocks import by_classes
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
    # PyTorch refuses class weights that need a gradient, unless the targets are probabilities.
    trains_weight = weight is not None and weight.requires_grad and not target.is_floating_point()
    if not plain or not fits or trains_weight:
        return NotImplemented
    projection.check()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if target.is_floating_point() and len(shape) == 3:
        target = target.transpose(1, 2)
    flat_target = target.reshape(hidden.shape[0], -1) if target.is_floating_point() else target.reshape(-1)
    loss = Loss(projection, steps, projection.tiling.ranges(hidden.shape[0]), weight, ignore_index, label_smoothing)
    # Gradients computed in forward are not multiplied by a loss scale yet, and those of float16 would underflow.
    in_forward = reduction != "none" and projection.dtype != torch.float16
    algorithm: LossAlgorithm | None = None
    if loss.ranges and projection.requires_grad and torch.is_grad_enabled() and not target.is_floating_point():
        algorithm = by_classes(loss, hidden, reduction, early=in_forward)
        if algorithm is None and in_forward:
            algorithm = InForward(loss, reduction)
    if algorithm is None:
        value = loss.by_rows(hidden, flat_target, reduction)
    else:
        value = in_one_node(algorithm, hidden, flat_target)
    return value.reshape(rows if reduction == "none" else ())


class InForward(LossAlgorithm):
    """A mean or sum whose gradients are computed in forward, one piece of the rows at a time.

    The gradients of captured tensors are sums over all pieces, accumulated in at least 32 bits.
    """

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = self.loss
        # `1 / count` would have the default dtype, which may have 16 bits.
        wide = accumulator(loss.projection.dtype)
        scale = 1 / loss.denominator(target).to(wide) if self.reduction == "mean" else None
        piece = self._linear_piece
        if loss.projection.linear is None:
            # Without views, a captured tensor computed from another (as a hypernetwork's for `functional_call`) would
            # be differentiated through it.
            leaves = all(tensor.is_leaf for tensor in loss.projection.captured)
            piece = partial(self._piece, loss if leaves else loss.of_views())
        self._hidden_grad = torch.empty_like(hidden) if hidden.requires_grad else None
        self._wanted = [tensor for tensor in loss.projection.captured if tensor.requires_grad]
        self._sums: dict[int, torch.Tensor] = {}  # by the id of the captured tensor
        total: torch.Tensor | None = None
        for start, length in loss.ranges:
            rows = slice(start, start + length)
            value = piece(hidden[rows], target[rows], scale, rows)
            total = value.to(accumulator(value.dtype)) + (0 if total is None else total)
            dtype = value.dtype
        assert total is not None
        for tensor in self._wanted:  # one by one, so that each sum is freed before the next cast
            self._sums[id(tensor)] = self._sums[id(tensor)].to(tensor.dtype)
        return (total if scale is None else total / loss.denominator(target)).to(dtype), []

    def backward(
        self, grad: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor, saved: list[torch.Tensor], *, last: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        hidden_grad = None if self._hidden_grad is None else scaled(self._hidden_grad, grad, last=last)
        return hidden_grad, {key: scaled(each, grad, last=last) for key, each in self._sums.items()}

    def _piece(self, loss: Loss, hidden: torch.Tensor, target: torch.Tensor, scale: Any, rows: slice) -> torch.Tensor:
        """Returns the loss of one piece of any projection, and adds its gradients, computed by autograd."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_(self._hidden_grad is not None)
            value = loss.of_logits(loss.projection(leaf), target, "sum")
            inputs = [tensor for tensor in (leaf, *loss.projection.captured) if tensor.requires_grad]
            found = list(torch.autograd.grad(value, inputs, scale, allow_unused=True, materialize_grads=True))
        if self._hidden_grad is not None:
            self._hidden_grad[rows] = found.pop(0)
        for tensor, grad in zip(self._wanted, found, strict=True):
            self._add(tensor, grad)
        return value.detach()

    def _linear_piece(self, hidden: torch.Tensor, target: torch.Tensor, scale: Any, rows: slice) -> torch.Tensor:
        """Returns the loss of one piece of `F.linear`, and adds its products directly to the sums."""
        assert self.loss.projection.linear is not None
        weight, _ = self.loss.projection.linear
        logits = self.loss.projection.product(hidden)
        with torch.enable_grad():
            value = self.loss.of_logits(logits.requires_grad_(), target, "sum")
            (grad,) = torch.autograd.grad(value, logits, scale)
        del logits
        if self._hidden_grad is not None:
            torch.mm(grad, weight, out=self._hidden_grad[rows])
        for tensor in self._wanted:
            if tensor is not weight:
                self._add(tensor, grad.sum(0, dtype=accumulator(grad.dtype)))
                continue
            if id(weight) not in self._sums:
                # One piece needs no sum. Of 16-bit weights only GPUs sum several, see `by_classes`.
                dtype = weight.dtype if len(self.loss.ranges) == 1 else accumulator(weight.dtype)
                self._sums[id(weight)] = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
            total = self._sums[id(weight)]
            if total.dtype == weight.dtype:
                total.addmm_(grad.t(), hidden)
                continue
            for start in range(0, len(total), _SUM_ROWS):  # in blocks, so that no second sum exists
                classes = slice(start, start + _SUM_ROWS)
                total[classes].add_(torch.mm(grad.t()[classes], hidden, out_dtype=total.dtype))
        return value.detach()

    def _add(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds one piece's gradient of a captured tensor."""
        if id(tensor) in self._sums:
            self._sums[id(tensor)].add_(grad)
        else:
            self._sums[id(tensor)] = grad.to(accumulator(grad.dtype))


_SUM_ROWS = 4096
