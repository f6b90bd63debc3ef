"""The state of `torch.func` that a region's ways to run depend on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Keeper:
    """Keeps a region's inputs until backward, in place of autograd."""

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A small tensor that autograd takes for `tensor`, and what `bring` needs beside it."""
        raise NotImplementedError

    def bring(self, token: torch.Tensor, slip: Any) -> torch.Tensor:
        """What `send` was given."""
        raise NotImplementedError


class _Inside(threading.local):
    inside = False
    keeper: Keeper | None = None


_local = _Inside()


def active() -> bool:
    """Whether a `torch.func` transform is running here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# Dynamo enters the transforms that it traces, and has a guard for those that it was called in.
active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forward_ad() -> bool:
    """Whether tensors here may carry tangents: inside `torch.autograd.forward_ad.dual_level`, or under `jvp`."""
    return torch.autograd.forward_ad._current_level >= 0


def inside_region() -> bool:
    """Whether a region is running or recomputing under `torch.func` here."""
    return _local.inside


@contextmanager
def region() -> Iterator[None]:
    """Run the body as a region under `torch.func`: those inside it are transparent."""
    before, _local.inside = _local.inside, True
    try:
        yield
    finally:
        _local.inside = before


def reverse_mode() -> bool:
    """Whether the transforms that run here differentiate in reverse mode, or vectorise, and no tensor has a tangent."""
    kinds = torch._C._functorch.TransformType
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return not forward_ad() and all(level.key() in (kinds.Grad, kinds.Vmap) for level in levels)


def has_rules() -> bool:
    """Whether the transforms that run here have rules for functions with a derivative of their own.

    `functionalize` has none. Where two or more differentiate in forward mode, PyTorch asks such a function for one
    tangent, and takes that of the tangent for zero, without an error. Nor may a rule use `jvp` inside of a
    `torch.autograd.forward_ad.dual_level` that is not of a `jvp` itself.
    """
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    return kinds.Functionalize not in levels and levels.count(kinds.Jvp) == int(forward_ad())


@contextmanager
def without_levels_above(level: int) -> Iterator[None]:
    """Run the body with the transforms above `level` left; above 0, outside all of them, on plain tensors."""
    left = []
    try:
        while (top := torch._C._functorch.peek_interpreter_stack()) is not None and top.level() > level:
            left.append(torch._C._functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while left:
            torch._C._functorch.push_dynamic_layer_stack(left.pop())


@contextmanager
def inputs_kept_by(keeper: Keeper) -> Iterator[None]:
    """Let the next region under `torch.func` that runs in the body give its inputs to `keeper`."""
    before, _local.keeper = _local.keeper, keeper
    try:
        yield
    finally:
        _local.keeper = before


def take_keeper() -> Keeper | None:
    """What is to keep the inputs of the region that begins here, and of no other one."""
    keeper, _local.keeper = _local.keeper, None
    return keeper
