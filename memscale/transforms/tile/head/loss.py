"""`Loss`: the settings of one cross entropy of lazy logits, and two ways to compute it.

`Loss.by_rows` is ordinary tiled code, differentiable any number of times. `in_one_node` is one autograd node whose
forward and backward some `LossAlgorithm` computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memscale.core import device_type
from memscale.transforms.tile.head.projection import Projection
from memscale.transforms.tile.pieces import is_out_of_place

ALL = slice(None)
_CASTS = (torch.Tensor.to, torch.Tensor.type)
Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function of the logits, with its other arguments


class Loss:
    """The settings of one cross entropy, and how a piece of it is computed.

    Args:
        projection: the projection that gives the logits.
        steps: the functions that were applied to the logits since (casts, scaling), in order.
        ranges: the (start, length) of each piece of the rows.
        class_weight: argument `weight` of `F.cross_entropy`.
        ignore_index: argument of `F.cross_entropy`.
        label_smoothing: argument of `F.cross_entropy`.
    """

    def __init__(
        self,
        projection: Projection,
        steps: tuple[Step, ...],
        ranges: list[tuple[int, int]],
        class_weight: torch.Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> None:
        self.projection = projection
        self.steps = steps
        self.ranges = ranges
        self.class_weight = class_weight
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def after_steps(self, logits: torch.Tensor, classes: slice = ALL) -> torch.Tensor:
        """Returns the logits of some classes after the steps."""
        for func, args, kwargs in self.steps:
            logits = func(logits, *_of_classes(args, classes), **kwargs)
        return logits

    @property
    def only_widens(self) -> bool:
        """Whether the steps are only casts to float32."""
        return all(
            func is torch.Tensor.float or (func in _CASTS and (*args, *kwargs.values()) == (torch.float32,))
            for func, args, kwargs in self.steps
        )

    def of_logits(self, logits: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        """Returns the loss of the rows of `logits`, which are logits before the steps."""
        return F.cross_entropy(
            self.after_steps(logits),
            target,
            weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )

    def of_rows(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the unreduced loss of some rows."""
        return self.of_logits(self.projection(hidden), target, "none")

    def denominator(self, target: torch.Tensor) -> torch.Tensor:
        """Returns the number by which ``reduction="mean"`` divides."""
        if target.is_floating_point():
            return torch.tensor(target.shape[0], device=target.device)
        kept = target != self.ignore_index
        if self.class_weight is None:
            return kept.sum()
        return torch.where(kept, self.class_weight[torch.where(kept, target, 0)], 0).sum()

    def by_rows(self, hidden: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        """Returns the loss, computed on recomputing pieces of the rows: any reduction, any order of derivatives."""
        rows: torch.Tensor = self.projection.tiling.rows(self.of_rows)(hidden, target)
        if reduction == "none":
            return rows
        return rows.sum() / self.denominator(target) if reduction == "mean" else rows.sum()

    def of_views(self) -> Loss:
        """Returns the same loss over views of the captured tensors, whose graph is separate from all others."""
        found = copy.copy(self)
        with torch.enable_grad():
            found.projection = self.projection.of_views()
        return found

    def gradients_with_a_graph(
        self, hidden: torch.Tensor, target: torch.Tensor, reduction: str, grad: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the hidden states and of each captured tensor, recomputed by rows.

        They are differentiable if this backward is.
        """
        # Over views: a weight from which the hidden states were computed gets here only its gradient through the head.
        differentiable, loss = torch.is_grad_enabled(), self.of_views()
        with torch.enable_grad():
            value = loss.by_rows(hidden, target, reduction)
        inputs = [hidden, *loss.projection.captured]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=differentiable))
        return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _of_classes(args: tuple[Any, ...], classes: slice) -> tuple[Any, ...]:
    """Returns a step's arguments for some classes: a tensor has one element, or one row of classes (`lazy_logits`)."""
    return tuple(arg[:, classes] if isinstance(arg, torch.Tensor) and arg.numel() > 1 else arg for arg in args)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which to sum numbers of `dtype`: at least 32 bits."""
    return torch.promote_types(dtype, torch.float32)


class LossAlgorithm:
    """Computes one loss and its gradients, in one autograd node, and keeps what forward leaves for backward.

    Args:
        loss: the settings.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    def __init__(self, loss: Loss, reduction: str) -> None:
        self.loss, self.reduction = loss, reduction

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the loss, and tensors for autograd to save."""
        raise NotImplementedError

    def backward(
        self, grad: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor, saved: list[torch.Tensor], *, last: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Returns the gradient of the hidden states, and the gradients of captured tensors by their ids.

        `last` means that this backward does not run again, so that kept gradients may be returned without a copy.
        """
        raise NotImplementedError


def in_one_node(algorithm: LossAlgorithm, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the loss that `algorithm` computes."""
    captured = algorithm.loss.projection.captured
    value: torch.Tensor = _Node.apply(algorithm, hidden, target, *captured)  # type: ignore[no-untyped-call]
    return value


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, algorithm: LossAlgorithm, hidden: torch.Tensor, target: torch.Tensor, *captured: torch.Tensor
    ) -> torch.Tensor:
        with without_hooks():
            value, saved = algorithm.forward(hidden, target)
        ctx.algorithm = algorithm
        # Class weights too, only for the error if they are changed in place before backward, which reads them again.
        ctx.save_for_backward(hidden, target, *saved, *captured, algorithm.loss.class_weight)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, target, *saved = ctx.saved_tensors  # raises if one was changed in place since
        algorithm: LossAlgorithm = ctx.algorithm
        if is_out_of_place(grad):  # recompute, with a graph
            hidden_grad, *rest = algorithm.loss.gradients_with_a_graph(hidden, target, algorithm.reduction, grad)
            return None, hidden_grad, None, *rest
        if last := not torch._C._autograd._get_current_graph_task_keep_graph():
            # Autograd stores a gradient without a copy if nobody else holds it, and this node outlives the backward.
            ctx.algorithm = None
        hidden_grad, found = algorithm.backward(grad, hidden, target, saved, last=last)
        return None, hidden_grad, None, *(found.get(id(tensor)) for tensor in algorithm.loss.projection.captured)


def scaled(gradient: torch.Tensor, grad: torch.Tensor, *, last: bool) -> torch.Tensor:
    """Returns `gradient * grad`; `last` allows changing `gradient` in place."""
    if last and device_type(grad) == "cpu" and grad.item() == 1:
        return gradient
    return gradient.mul_(grad) if last else gradient * grad


def without_hooks() -> Any:
    """Returns a context without the surrounding saved-tensor hooks, so that a piece's residuals are freed with it."""
    # Detached: an operator that saves its own result would keep itself alive in a reference cycle.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
