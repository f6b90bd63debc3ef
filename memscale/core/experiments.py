"""Facts about PyTorch that memscale finds by an experiment, once per process, outside of all modes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from memscale.core import internals

T = TypeVar("T")


def found_once(find: Callable[[], T]) -> Callable[[], T]:
    """Decorates `find`, an experiment with tensors, so that it runs once, outside of all dispatch modes.

    The first call may come from a simulated step or under a user's mode. The mode would see tensors that no later step
    makes, and could change the result, which is cached for the whole process.

    >>> calls = []
    >>> fact = found_once(lambda: calls.append("tried") or 4)
    >>> fact(), fact(), calls
    (4, 4, ['tried'])
    """

    answers: list[T] = []
    lock = threading.RLock()  # run once: PyTorch refuses to register the same thing a second time

    def found() -> T:
        if not answers:
            with lock:
                if not answers:
                    with internals.disable_current_modes():
                        answers.append(find())
        return answers[0]

    return functools.wraps(find)(found)
