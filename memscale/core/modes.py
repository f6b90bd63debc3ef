"""Facts about PyTorch that are found by trying, once, and not by what happens to be going on then."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

from memscale.core import internals

T = TypeVar("T")


def found_once(find: Callable[[], T]) -> Callable[[], T]:
    """`find`, which makes tensors to see how PyTorch treats them, called once and outside of all dispatch modes.

    Whoever asks first may be a region of a simulated step, or of one under a user's mode: it would be told of tensors
    that no later step makes, and what it answers would stay for the whole process.

    >>> calls = []
    >>> fact = found_once(lambda: calls.append("tried") or 4)
    >>> fact(), fact(), calls
    (4, 4, ['tried'])
    """

    answers: list[T] = []
    lock = threading.RLock()  # what is registered with PyTorch is refused the second time

    def found() -> T:
        if not answers:
            with lock:
                if not answers:
                    with internals.disable_current_modes():
                        answers.append(find())
        return answers[0]

    return functools.wraps(find)(found)
