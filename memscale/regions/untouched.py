"""Run a step and leave no trace: whatever its captures reach is put back, and the random generators with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch

from memscale.regions.captures import Captures, put_back
from memscale.regions.environment import Environment, accelerators

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of tensors


@contextmanager
def untouched(
    captures: Captures, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, computes: bool
) -> Iterator[None]:
    """Run the body without gradients at first, then put back attributes, containers, tensors and random states.

    Each is put back whatever the body raised, and whatever putting back another one did.

    Args:
        captures: what was reached before the body.
        leaves: the tensors whose ``.grad`` is set aside meanwhile.
        tensors: those that get their version counters back, and their values.
        computes: whether the body changes values, and draws from the process's generators. The copies are in host
            memory, where an accelerator's allocator, which the body may be measured by, does not count them.
    """
    devices = accelerators(tensors)
    versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    values = [(tensor, _copy(tensor)) for tensor in tensors if _can_change(tensor)] if computes else []
    gradients = [(tensor, tensor.grad) for tensor in leaves if tensor.is_leaf and tensor.requires_grad]
    # A forward may ask for the gradients of its batch, or freeze what has been trained enough.
    trained = [(tensor, tensor.requires_grad, tensor.grad) for tensor, _ in versions if tensor.is_leaf]
    with ExitStack() as stack:
        # In the order that the last one is put back first.
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
        stack.callback(put_back, captures)
        for tensor, _ in gradients:
            tensor.grad = None
        yield


def _can_change(tensor: torch.Tensor) -> bool:
    """Whether operators in place are allowed on it: not where several elements are one number in memory."""
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
    """Give back the same dict, for handles refer to it, with what it held."""
    now = getattr(tensor, name)
    if now is not hooks:
        if now is not None:
            now.clear()  # autograd may hold it still
        setattr(tensor, name, hooks)
    if hooks is not None and hooks != before:
        hooks.clear()
        hooks.update(before)


def _set_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
