"""Operators of our own, hidden from those who watch a region's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Local(threading.local):
    hidden = False


_local = _Local()


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the body's operators from recorders: our own copies must not count as the region's operators."""
    before, _local.hidden = _local.hidden, True
    try:
        yield
    finally:
        _local.hidden = before


def is_hidden() -> bool:
    """Whether the operators that run here now are our own."""
    return _local.hidden
