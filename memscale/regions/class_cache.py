"""A cache of results per class, which does not keep the class alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")


def cached_by_class(ask: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
    """Decorates `ask`, a function of one class, to run once per class. Its results must not refer to the class.

    `functools.lru_cache` would keep the class alive, and a model with it: `torch.nn.utils.parametrize` makes a class
    for each module, with a property that refers to the module.
    """
    answers: dict[int, _Answer] = {}
    alive: dict[int, Any] = {}

    @functools.wraps(ask)
    def answer(kind: Any) -> _Answer:
        key = id(kind)
        try:
            return answers[key]
        except KeyError:
            pass
        found = ask(kind)

        def forget(_: object) -> None:
            del answers[key], alive[key]

        alive[key] = weakref.ref(kind, forget)
        answers[key] = found
        return found

    return answer
