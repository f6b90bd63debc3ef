"""Being told of every step of an optimizer, for as long as whoever asked is there."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memscale.core import simulating


class Listener(Protocol):
    """Who is told."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, any, has made a step."""


_listening: weakref.WeakSet[Listener] = weakref.WeakSet()
_hooks: list[Any] = []


def listen(listener: Listener) -> None:
    """Tell `listener` of steps from here on. There is no need to say when it goes."""
    # One hook for all, which no finalizer takes off: garbage is also collected while an optimizer goes through its
    # hooks, and a dictionary that changes then is an error in somebody's step.
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _listening.add(listener)


def leave(listener: Listener) -> None:
    """Tell it no more."""
    _listening.discard(listener)
    if not _listening and _hooks:
        _hooks.pop().remove()


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not simulating():
        for listener in list(_listening):
            listener.after_step(optimizer)
