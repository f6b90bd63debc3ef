"""`name`: labels a tensor, for checkpoint policies and for inspection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from memscale.core import ConfigError

T = TypeVar("T", bound=torch.Tensor)


class _Listeners(threading.local):
    def __init__(self) -> None:
        self.stack: list[Callable[[torch.Tensor, str], None]] = []


listeners = _Listeners()
"""The callbacks for labels in this thread: recorders of selective checkpoint policies, and `saved_residuals`."""


def name(tensor: T, label: str) -> T:
    """Returns `tensor`, and gives it the label `label` for the policy of the surrounding checkpoint.

    >>> import torch, memscale as ms
    >>> def block(x, w):
    ...     return torch.sin(ms.name(x @ w, "projection")) ** 2
    >>> keep = ms.checkpoint(policy=ms.policies.save_only_these_names("projection"))
    >>> x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    >>> [r.label for r in ms.saved_residuals(keep(block), x, w) if r.label]
    ['projection']

    Outside a checkpoint the call does nothing. The label belongs to the operator that made the tensor's memory, so
    naming a view names its base as well.

    Args:
        tensor: any tensor.
        label: a non-empty string; many tensors may share one.

    Raises:
        ConfigError: `label` is not a non-empty string, or `tensor` is not a tensor.

    Source: ``jax.ad_checkpoint.checkpoint_name``.
    """
    if not isinstance(label, str) or not label:
        got = "a tensor; write name(x, 'hidden')" if isinstance(label, torch.Tensor) else repr(label)
        raise ConfigError(f"name(tensor, label): the label is a non-empty string, got {got}")
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"name(tensor, label) labels a tensor, got {type(tensor).__name__} for label {label!r}")
    for hear in listeners.stack:
        hear(tensor, label)
    return tensor
