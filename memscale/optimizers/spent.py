"""`SpentGradient`: takes the place of a gradient that `step_in_backward` has used, and raises when it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale.core import TransformError


class SpentGradient(torch.Tensor):
    """The gradient of a parameter that has stepped in backward: a tensor without memory that raises on every read.

    With None in its place, clipping would silently find nothing to clip, a loss scaler no gradient to check, and a
    second backward would begin a new sum. The class does not implement tensor flattening, so torch.compile leaves code
    that reads such a gradient to Python, where it raises.
    """

    title: str

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, title: str) -> SpentGradient:
        made = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device, storage_size=0
        )
        made.title = title
        return made

    __torch_function__ = nn.Parameter.__torch_function__  # PyTorch's own for a class without one

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]  # `parameter.grad.detach()`: the next read raises
        spent = next(each for each in _flat((args, kwargs or {})) if isinstance(each, SpentGradient))
        raise spent._gone(str(func))

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Raises: PyTorch's optimizers read this property before they change anything. Dynamo gets False."""
        if torch._guards.TracingContext.try_get() is not None:
            return False  # Dynamo describes the parameter and its gradient; the graph does not read the gradient
        raise self._gone("is_sparse")

    def _gone(self, asked: str) -> TransformError:
        return TransformError(
            f"the gradient of {self.title} is gone: step_in_backward() used it when it was complete, and {asked} asks "
            "for it now. Call zero_grad() after each step; for several backward passes a step say "
            "step_in_backward(accumulate=...), clipping by their norm takes step_in_backward(max_norm=...); "
            "what else needs them at once, as a loss scale does, goes without step_in_backward()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpentGradient({self.title})"


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for each in tree for leaf in _flat(each)]
    return [leaf for each in tree.values() for leaf in _flat(each)] if isinstance(tree, dict) else [tree]
