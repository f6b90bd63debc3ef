"""``prod`` and ``cumprod``, whose backward goes another way while anything watches PyTorch's operators.

Under a dispatch mode, as a simulation is one, it takes formulas that are right where numbers are zero, of several times
the memory; without one it looks for zeros, and where there are none it divides by what it multiplied.
Source: ``prod_backward`` and ``cumprod_backward`` in torch/csrc/autograd/FunctionsManual.cpp and ReduceOps.cpp of
PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from memscale.simulation.sandbox.process_state import patched


class _Product(torch.autograd.Function):
    """Keeps its input and its result."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int | None
    ) -> torch.Tensor:
        result = run(x)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        ctx.stands_in = True  # for PyTorch's own, which is known to compute each row by itself
        return result


class _Prod(_Product):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        x = x.to(grad.dtype)
        if not x.dim():
            return None, grad, None
        if ctx.dim is None:
            _ = x == 0  # in which it looks for zeros, and lets go of it
            del _
            return None, grad * (result / x).conj(), None
        if grad.dim() < x.dim():
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        is_zero = x == 0
        zeros = is_zero.sum(ctx.dim, keepdim=True)
        zeros.sum()
        return None, grad * (result / x).conj(), None


class _Cumprod(_Product):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        grad = grad.to(x.dtype)
        if x.numel() <= 1 or x.size(ctx.dim) == 1:
            return None, grad, None
        weighted = result.conj() * grad
        is_zero = x == 0
        is_zero.any()
        return None, _summed_from_the_end(weighted, ctx.dim).div(x.conj()), None


def _summed_from_the_end(x: torch.Tensor, dim: int) -> torch.Tensor:
    turned = x.flip(dim)  # stays until the sums are turned, too
    sums = turned.cumsum(dim)
    return sums.flip(dim)


@contextmanager
def products_unwatched() -> Iterator[None]:
    """Let ``prod`` and ``cumprod`` go back as they do without a mode, of numbers none of which is zero.

    >>> x = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    >>> with products_unwatched():
    ...     (x.prod() + torch.cumprod(x, 0).sum()).backward()
    >>> x.grad
    tensor([28., 18., 12.])
    """
    with ExitStack() as stack:
        for holder in (torch, torch.Tensor):
            stack.enter_context(patched(holder, "prod", _followed(holder.prod, _Prod)))
            stack.enter_context(patched(holder, "cumprod", _followed(holder.cumprod, _Cumprod)))
        yield


def _followed(original: Callable[..., torch.Tensor], product: type[_Product]) -> Callable[..., torch.Tensor]:
    """`original`, as a `product` where its backward would look at the numbers."""

    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        x, dim = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "dim")
        names_dim = isinstance(dim, int) or (dim is None and product is _Prod)
        if not _is_followed(x) or kwargs.get("out") is not None or not names_dim:
            return original(*args, **kwargs)
        return product.apply(_but_first(original, args, kwargs), x, dim)  # type: ignore[no-any-return,no-untyped-call]

    return computed


def _argument(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _but_first(original: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    return lambda x: original(x, *args[1:], **rest)


def _is_followed(x: Any) -> bool:
    """Whether autograd takes a formula for this tensor, and one that a mode changes."""
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(x)
    return is_plain and x.requires_grad and torch.is_grad_enabled()
