"""Operators of our own, which those who record the operators of a region must not see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Local(threading.local):
    unrecorded = False


_local = _Local()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the body's operators from recorders: our own copies must not count as the region's operators."""
    before, _local.unrecorded = _local.unrecorded, True
    try:
        yield
    finally:
        _local.unrecorded = before


def is_unrecorded() -> bool:
    """Whether the operators that run here now are our own."""
    return _local.unrecorded
