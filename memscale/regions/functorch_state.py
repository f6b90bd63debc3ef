"""The state of `torch.func` that a region's ways to run depend on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Inside(threading.local):
    inside = False


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


def has_rules() -> bool:
    """Whether the transforms that run here have rules for functions with a derivative of their own.

    `functionalize` has none. Where two or more differentiate in forward mode, PyTorch asks such a function for one
    tangent, and takes that of the tangent for zero, without an error. Nor may a rule use `jvp` inside of a
    `torch.autograd.forward_ad.dual_level` that is not of a `jvp` itself.
    """
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    return kinds.Functionalize not in levels and levels.count(kinds.Jvp) == int(forward_ad())
