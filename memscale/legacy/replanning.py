"""`Replanning`: notices the training calls of a wrapped model, and asks for a plan that a call lacks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from memscale.legacy.hooks import is_a_step_of_its_own
from memscale.legacy.shapes import PlansByShapes, Shapes, shapes_of


class Planned(Protocol):
    """A model whose plan can change."""

    def model_or_none(self) -> nn.Module | None:
        """Returns the model, or None if the model is gone."""

    def follow(self, args: Any, kwargs: Any, shapes: Shapes) -> None:
        """Makes the plan that a call with these arguments needs, if a plan is due."""


class Replanning:
    """Observes the calls of one model by a forward pre-hook.

    Args:
        planned: the model, and what to do when no plan serves a call.

    Attributes:
        plans: which plan serves which batch.
    """

    def __init__(self, planned: Planned) -> None:
        self.plans = PlansByShapes()
        self._planned = planned
        self._hook: Any = None
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()  # held while a plan is made and installed
        self._thread: int | None = None  # the id of the thread that is planning

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("lock", "_thread")}
        return {**state, "plans": PlansByShapes(present=self.plans.present)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def begin(self, model: nn.Module) -> None:
        """Observes the calls of `model` from now on."""
        self._hook = model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)

    def end(self) -> None:
        """Stops observing, and forgets all plans."""
        if self._hook is not None:
            self._hook.remove()
        self.plans.known.clear()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Within the block this thread plans, and its own calls of the model ask for no plan."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward pre-hook: precedes wrappers around the forward, such as autocast's."""
        if torch.compiler.is_compiling() or model is not self._planned.model_or_none():
            return
        if self._thread not in (None, threading.get_ident()):
            with self.lock:  # waits until the other thread has installed the regions again
                pass
        if not torch.is_grad_enabled() or self._thread is not None:
            return
        shapes = shapes_of((args, kwargs))
        if not self.plans.serves(shapes):
            if not is_a_step_of_its_own(model):
                return
            with self.lock:
                self._planned.follow(args, kwargs, shapes)
        self.plans.between_steps = False
