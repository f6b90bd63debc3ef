"""When an optimizer of a simulated step steps, whichever it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import is_own_thread
from memscale.simulation.sandbox.process_state import placed

_Hook = Callable[[torch.optim.Optimizer, Any, Any], None]


@contextmanager
def optimizers_followed(before: _Hook, after: _Hook) -> Iterator[None]:
    """Call `before` and `after` around each step of an optimizer in the threads of the simulation.

    A hook of all optimizers would be in the table of all threads. This is one that an optimizer seems to have itself,
    where the wrapper of its `step` looks there.
    """
    names = ("_optimizer_step_pre_hooks", before), ("_optimizer_step_post_hooks", after)
    (pre, first), (post, last) = names
    with (
        placed(torch.optim.Optimizer, pre, _Hooks(pre, first)),
        placed(torch.optim.Optimizer, post, _Hooks(post, last)),
    ):
        yield


class _Hooks:
    """An attribute of optimizers: their own table of hooks, and one hook more for who is about to call them."""

    def __init__(self, name: str, hook: _Hook) -> None:
        self._name = name
        self._hook = hook

    def __get__(self, optimizer: Any, owner: Any = None) -> Any:
        if optimizer is None:
            return self
        try:
            own = optimizer.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        caller = sys._getframe(1).f_code
        if caller.co_name == "wrapper" and caller.co_filename == _WRAPPER.co_filename and is_own_thread():
            return {**own, self: self._hook}
        return own

    def __set__(self, optimizer: Any, hooks: Any) -> None:
        optimizer.__dict__[self._name] = hooks

    def __delete__(self, optimizer: Any) -> None:
        del optimizer.__dict__[self._name]


_WRAPPER = torch.optim.Optimizer.profile_hook_step.__code__
