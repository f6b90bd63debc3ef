"""The state of `torch.func` that a region's ways to run depend on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Local(threading.local):
    inside = False


_local = _Local()


def active() -> bool:
    """Whether a `torch.func` transform is running here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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
