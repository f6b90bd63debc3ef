"""Locks that a fork of the process finds open."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """A lock that is free in a child of this process, where the thread that held it is not.

    Without that, a child of a process with several threads would wait forever for what it has to be told: that it
    cannot use what its parent has.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in _locks:
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_open_all)
