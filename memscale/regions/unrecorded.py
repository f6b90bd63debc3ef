"""Operators of our own, which those who record the operators of a region must not see."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager


class _Local(threading.local):
    depth = 0
    ahead = 0


_local = _Local()


class _Counted(AbstractContextManager[None]):
    def __init__(self, *, depth: int, ahead: int) -> None:
        self._depth, self._ahead = depth, ahead

    def __enter__(self) -> None:
        _local.depth += self._depth
        _local.ahead += self._ahead

    def __exit__(self, *_: object) -> None:
        _local.depth -= self._depth
        _local.ahead -= self._ahead


_unrecorded = _Counted(depth=1, ahead=0)
_ahead = _Counted(depth=0, ahead=1)
_unrecorded_ahead = _Counted(depth=1, ahead=1)


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


def copying_ahead(*, recorded: bool = True) -> AbstractContextManager[None]:
    """Copy tensors in the body that the region may never use: who watches for a tensor watches for its copies then."""
    return _ahead if recorded else _unrecorded_ahead


def copies_ahead() -> bool:
    return _local.ahead > 0
