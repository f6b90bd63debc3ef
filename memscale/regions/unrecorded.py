"""Operators of our own, which those who record the operators of a region must not see."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager


class _Local(threading.local):
    depth = 0


_local = _Local()


class _Unrecorded(AbstractContextManager[None]):
    def __enter__(self) -> None:
        _local.depth += 1

    def __exit__(self, *_: object) -> None:
        _local.depth -= 1


_unrecorded = _Unrecorded()


def unrecorded() -> AbstractContextManager[None]:
    """Hide the body's operators from recorders: our own copies must not count as the region's operators."""
    return _unrecorded


def is_unrecorded(since: int = 0) -> bool:
    """Whether the operators that run here now are our own; for a recorder that was made within such a body, `since`
    that one.
    """
    return _local.depth > since


def unrecorded_depth() -> int:
    """In how many such bodies this is."""
    return _local.depth
