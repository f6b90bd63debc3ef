"""The saved-tensor hooks around a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from memscale.core import TransformError

F = TypeVar("F", bound=Callable[..., Any])


def hooks_around() -> Any:
    """What autograd calls here with each tensor that it would save, and with each that backward asks for; or `None`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class PacksSeveral:
    """Saved-tensor hooks that take several tensors at once, in a method beside `pack`."""

    def pack_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """What `pack` would return for each of `tensors`, which it is given with their graph."""
        raise NotImplementedError


def pack_all(pack: Callable[[torch.Tensor], Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """What the hook `pack` returns for each of `tensors`."""
    hooks = getattr(pack, "__self__", None)
    if isinstance(hooks, PacksSeveral):
        return hooks.pack_all(tensors)
    return [pack(tensor.detach()) for tensor in tensors]


class naming_refused_hooks:
    """Run a region of the transform `how`, which needs saved-tensor hooks for what it does, `doing`.

    Raises:
        TransformError: the region uses a transform of `torch.func`, which refuses hooks.
    """

    __slots__ = ("_doing", "_how")

    def __init__(self, how: object, doing: str) -> None:
        self._how, self._doing = how, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if type(error) is RuntimeError and "saved tensor hooks" in str(error):
            raise TransformError(
                f"the region of {self._how!r} uses a transform of torch.func, which refuses the saved-tensor hooks "
                f"that {self._doing} needs; leave it out of this region, or use torch.autograd.grad there"
            ) from error


def recomputing(unpack: F) -> F:
    """`unpack`, known to `recomputes`: its hooks drop what they are given and run the region again."""
    unpack.__memscale_recomputes__ = True  # type: ignore[attr-defined]
    return unpack


def recomputes(unpack: Any) -> bool:
    """Whether `unpack` belongs to a checkpoint, ours or PyTorch's. Inside these there is nothing to keep anywhere."""
    return hasattr(unpack, "__memscale_recomputes__") or getattr(unpack, "__module__", None) == "torch.utils.checkpoint"
