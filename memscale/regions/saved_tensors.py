"""Queries of the saved-tensor hooks that are active around a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from memscale.core import TransformError

F = TypeVar("F", bound=Callable[..., Any])


def hooks_around() -> Any:
    """Returns the innermost active saved-tensor hooks as (pack, unpack), or `None`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class PacksSeveral:
    """Saved-tensor hooks with a method that packs several tensors in one call, besides `pack`."""

    def pack_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the result of `pack` for each of `tensors`, which are not detached."""
        raise NotImplementedError


def pack_all(pack: Callable[[torch.Tensor], Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Packs each of `tensors` by the hook `pack`, in one call if the hook's object is a `PacksSeveral`."""
    hooks = getattr(pack, "__self__", None)
    if isinstance(hooks, PacksSeveral):
        return hooks.pack_all(tensors)
    return [pack(tensor.detach()) for tensor in tensors]


def name_refused_hooks(error: RuntimeError, how: object, doing: str) -> None:
    """Raises `TransformError` if `error` is PyTorch's refusal of the saved-tensor hooks that `doing` needs.

    PyTorch refuses these hooks under `torch.func`, in words that do not name the region of the transform `how`.
    """
    if type(error) is RuntimeError and "saved tensor hooks" in str(error):
        raise TransformError(
            f"the region of {how!r} uses a transform of torch.func, which does not allow the saved-tensor "
            f"hooks that {doing} needs; move it out of the region, or use torch.autograd.grad there"
        ) from error


def recomputing(unpack: F) -> F:
    """Marks `unpack` as a hook of a checkpoint, for `recomputes`: its pack hook drops tensors and unpack recomputes."""
    unpack.__memscale_recomputes__ = True  # type: ignore[attr-defined]
    return unpack


def recomputes(unpack: Any) -> bool:
    """Whether `unpack` belongs to a checkpoint, ours or PyTorch's, inside which no tensor is saved."""
    return hasattr(unpack, "__memscale_recomputes__") or getattr(unpack, "__module__", None) == "torch.utils.checkpoint"
