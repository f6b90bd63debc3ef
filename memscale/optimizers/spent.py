"""What stands where a gradient was that is used up: a tensor without memory that lets nobody read it."""

from __future__ import annotations

from typing import Any

import torch

from memscale.core import TransformError


class SpentGradient(torch.Tensor):
    """The gradient of a parameter that has stepped already.

    It says nothing of parts that it is made of: so a compiler leaves code that reads it to Python, where it raises.

    Not None: clipping would find nothing to clip, a loss scaler no gradient to look at, and a second backward would
    begin a new sum, all of them without a word.
    """

    title: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, title: str) -> SpentGradient:
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device, storage_size=0
        )
        made.title = title
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]  # `parameter.grad.detach()`, of whoever then finds out
        spent = next(each for each in _flat((args, kwargs or {})) if isinstance(each, SpentGradient))
        raise spent._gone(str(func))

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """What PyTorch's optimizers ask before they change anything, and Dynamo of each parameter's gradient."""
        if torch._guards.TracingContext.try_get() is not None:
            return False  # a compiler describes the parameter, whose gradient its graph does not read
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
