"""Queries about the state of `torch.func`, by which a region chooses how to run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Inside(threading.local):
    inside = False


_local = _Inside()


def active() -> bool:
    """Whether a `torch.func` transform is active in this thread."""
    return torch._C._functorch.get_interpreter_stack() is not None


# A constant to Dynamo is correct here: Dynamo enters the transforms that it traces, and guards on the outer ones.
active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forward_ad() -> bool:
    """Whether tensors may carry tangents: inside `torch.autograd.forward_ad.dual_level`, or under `jvp`."""
    return torch.autograd.forward_ad._current_level >= 0


def is_absent() -> bool:
    """Whether no transform is active, no tensor has a tangent, and this thread is in no region under a transform."""
    return not (
        _local.inside
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.get_interpreter_stack() is not None
    )


def inside_region() -> bool:
    """Whether this thread is running or recomputing a region under `torch.func`."""
    return _local.inside


@contextmanager
def region() -> Iterator[None]:
    """Runs the body as a region under `torch.func`. Regions inside the body run untransformed."""
    before, _local.inside = _local.inside, True
    try:
        yield
    finally:
        _local.inside = before


def has_rules() -> bool:
    """Whether the active transforms support custom `torch.autograd.Function` rules correctly.

    `functionalize` does not. Under two or more forward-mode transforms, PyTorch asks the function for one tangent and
    silently takes the tangent of that tangent to be zero. A rule cannot use `jvp` inside a
    `torch.autograd.forward_ad.dual_level` that was entered by hand.
    """
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    return kinds.Functionalize not in levels and levels.count(kinds.Jvp) == int(forward_ad())
