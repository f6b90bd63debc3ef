"""Marks memscale's own operators, such as copies, so that recorders of a region's operators skip them."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager


class _Local(threading.local):
    depth = 0
    ahead = 0


# Hooks that run for each saved tensor count `depth` themselves: a context would take ten times as long.
hiding = _Local()


class _Counted(AbstractContextManager[None]):
    def __init__(self, *, depth: int, ahead: int) -> None:
        self._depth, self._ahead = depth, ahead

    def __enter__(self) -> None:
        hiding.depth += self._depth
        hiding.ahead += self._ahead

    def __exit__(self, *_: object) -> None:
        hiding.depth -= self._depth
        hiding.ahead -= self._ahead


_unrecorded = _Counted(depth=1, ahead=0)
_ahead = _Counted(depth=0, ahead=1)
_unrecorded_ahead = _Counted(depth=1, ahead=1)


def unrecorded() -> AbstractContextManager[None]:
    """Returns a context that hides its operators from recorders, for copies that are not operators of the region."""
    return _unrecorded


def is_unrecorded(since: int = 0) -> bool:
    """Whether this thread is inside `unrecorded()`, at a greater depth than `since`.

    A recorder that was made inside `unrecorded()` passes the depth at which it was made.
    """
    return hiding.depth > since


def unrecorded_depth() -> int:
    """Returns how many `unrecorded()` contexts are open in this thread."""
    return hiding.depth


def copying_ahead(*, recorded: bool = True) -> AbstractContextManager[None]:
    """Returns a context for copies of tensors that the region may never use.

    Inside the context, a copy of a changed tensor does not count as a use: a replay treats the copy as changed, too.
    """
    return _ahead if recorded else _unrecorded_ahead


def copies_ahead() -> bool:
    return hiding.ahead > 0
