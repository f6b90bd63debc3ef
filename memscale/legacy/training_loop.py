"""What a wrapped model learns of its training loop: gradients in memory, calls before a backward, optimizer steps."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memscale.core import in_process_group, simulating
from memscale.regions import dispatch_modes, functorch_state


def is_a_step_of_its_own(model: nn.Module) -> bool:
    """Whether this call of `model` belongs to a training loop, so that its step can be simulated now.

    False under `torch.func`, a tracer, a simulation or another dispatch mode, in a recompute, and with substituted
    parameters. False in a process group, whose gradient hooks would take simulated gradients for real ones.
    """
    return model.training and not (
        simulating()
        or functorch_state.active()
        or torch._C._current_graph_task_id() != -1
        or dispatch_modes()
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
        or in_process_group()
        or any(not isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    )


class LoopWatch:
    """Observes two steps of a training loop, or 64 calls, for memory that a plan for one pass leaves out.

    Attributes:
        finds_gradients: whether gradients were in memory as a forward began.
        calls: the most calls of the model that began before a backward, by the parameters: no step has changed them
            between these calls, and no gradient was in memory.
        steps: the steps of the model's optimizers.
    """

    _STEPS, _CALLS = 2, 64

    def __init__(self) -> None:
        self.finds_gradients = False
        self.calls = 1
        self.steps = self._watched = 0
        self._version = self._alike = 0  # the sum of the parameters' versions, and the calls of this step with that sum
        self._before = 1, 0  # `calls` and `_alike` before the last call

    @property
    def watches(self) -> bool:
        """Whether the loop is still observed."""
        return self.steps < self._STEPS and self._watched < self._CALLS

    def called(self, model: nn.Module) -> None:
        """Called before each call of `model` in a training step."""
        self._watched += 1
        self._before = self.calls, self._alike
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if all(parameter.grad is None for parameter in trained):
            version = sum(parameter._version for parameter in trained)
            self._alike = self._alike + 1 if version == self._version else 1
            self._version = version
            self.calls = max(self.calls, self._alike)
        elif self._watched > 1:  # gradients in the very first call are from before the loop
            self.finds_gradients = True

    def raised(self) -> None:
        """Called where the last call raised: it keeps no activations."""
        self.calls, self._alike = self._before

    def after_step(self) -> None:
        """Called after each step of the model's optimizer."""
        self.steps += 1
        self._alike = 0

    def text(self, kind: str) -> str | None:
        """Describes calls that share a backward; None if each call has its own."""
        if self.calls == 1:
            return None
        return (
            f"this {kind} was called {self.calls} times before a backward, and the plan is for one call: each further "
            "call keeps its activations as well, so the step takes more than planned; make these calls in the forward "
            "of one module and wrap that module, or call the model once with the batches in one"
        )


class Listener(Protocol):
    """The interface for observers of optimizer steps."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of any optimizer."""


_listening: weakref.WeakSet[Listener] = weakref.WeakSet()
_hooks: list[Any] = []


def listen(listener: Listener) -> None:
    """Calls `listener.after_step` after every optimizer step from now on, as long as the listener lives."""
    # One hook for all listeners, and none per listener: a finalizer could remove it while an optimizer iterates over
    # its hooks, and changing a dictionary then raises in the user's step.
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
    _listening.add(listener)


def leave(listener: Listener) -> None:
    """Stops calling `listener`."""
    _listening.discard(listener)
    if not _listening and _hooks:
        _hooks.pop().remove()


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not simulating():
        for listener in list(_listening):
            listener.after_step(optimizer)
