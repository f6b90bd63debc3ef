"""Runs a step without side effects: the state in its captures and the random generators are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch

from memscale.regions.captures import Captures
from memscale.regions.environment import Environment, accelerators

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of tensors


@contextmanager
def without_side_effects(
    captures: Captures, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, computes: bool
) -> Iterator[None]:
    """Runs the body with every ``.grad`` unset, then restores attributes, containers, tensors and random states.

    Every part of the state is restored, even if the body raises or the restoring of another part raises.

    Args:
        captures: the captures of the step, read before the body.
        leaves: the tensors whose ``.grad`` is set to `None` for the body and restored after it.
        tensors: the tensors whose version counters, and with `computes` also values, are restored.
        computes: whether the body changes values and draws from the process's generators. The copies of the values are
            in host memory, so that a measurement of an accelerator's allocator does not include them.
    """
    devices = accelerators(tensors)
    versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    values = [(tensor, _copy(tensor)) for tensor in tensors if _can_change(tensor)] if computes else []
    gradients = [(tensor, tensor.grad) for tensor in leaves if tensor.is_leaf and tensor.requires_grad]
    # `requires_grad` is restored too: a forward may set it on its batch, or freeze a parameter.
    trained = [(tensor, tensor.requires_grad, tensor.grad) for tensor, _ in versions if tensor.is_leaf]
    with ExitStack() as stack:
        # The stack runs its callbacks in reverse order, so the environment is restored last.
        environment = Environment(devices, host_random=computes, generators=captures.generators)
        if not computes:
            environment.leave_shared()
        stack.callback(environment.enter, [])
        for tensor, version in versions:
            stack.callback(_set_version, tensor, version)
        for tensor, value in values:
            stack.callback(_set_value, tensor, value)
        for tensor, is_trained, gradient in trained:
            stack.callback(_set_trained, tensor, is_trained, gradient)
        for tensor, gradient in gradients:
            stack.callback(partial(setattr, tensor, "grad", gradient))
        for tensor, name in product(leaves, _HOOKS):
            hooks = getattr(tensor, name)
            stack.callback(_set_hooks, tensor, name, hooks, {} if hooks is None else dict(hooks))
        stack.callback(captures.restore)
        for tensor, _ in gradients:
            tensor.grad = None
        yield


def _can_change(tensor: torch.Tensor) -> bool:
    """Whether `tensor` can be written in place, which PyTorch refuses if elements share memory (an expanded tensor)."""
    if tensor.is_meta or tensor.is_inference():
        return False
    return (
        tensor.is_nested
        or tensor.layout != torch.strided
        or not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    )


def _set_trained(tensor: torch.Tensor, is_trained: bool, gradient: torch.Tensor | None) -> None:
    if tensor.is_leaf and tensor.requires_grad is not is_trained:
        tensor.requires_grad_(is_trained)
        tensor.grad = gradient


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _set_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


def _set_hooks(tensor: torch.Tensor, name: str, hooks: dict[int, Any] | None, before: dict[int, Any]) -> None:
    """Restores the hooks into the same dictionary `hooks`, since the handles of hooks refer to it."""
    now = getattr(tensor, name)
    if now is not hooks:
        if now is not None:
            now.clear()  # autograd may still refer to this dictionary
        setattr(tensor, name, hooks)
    if hooks is not None and hooks != before:
        hooks.clear()
        hooks.update(before)


def _set_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
