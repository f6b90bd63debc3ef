"""The saved-tensor hooks around a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def hooks_around() -> Any:
    """What autograd calls here with each tensor that it would save, and with each that backward asks for; or `None`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def recomputing(unpack: F) -> F:
    """`unpack`, known to `recomputes`: its hooks drop what they are given and run the region again."""
    unpack.__memscale_recomputes__ = True  # type: ignore[attr-defined]
    return unpack


def recomputes(unpack: Any) -> bool:
    """Whether `unpack` belongs to a checkpoint, ours or PyTorch's. Inside these there is nothing to keep anywhere."""
    return hasattr(unpack, "__memscale_recomputes__") or getattr(unpack, "__module__", None) == "torch.utils.checkpoint"
