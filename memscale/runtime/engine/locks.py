"""Locks that are released in a forked child process."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Returns a lock that is free in a forked child, where the thread that holds it in the parent does not exist.

    Without this, a child of a multi-threaded process could wait forever for the lock, instead of getting the error that
    a fork cannot use its parent's runtime.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in _locks:
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_open_all)
