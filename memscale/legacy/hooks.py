"""What is told of a wrapped model while it trains: which of its regions run, and every step of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memscale.algebra import Plan
from memscale.core import Assembled, in_process_group, simulating
from memscale.regions import functorch_state

_Same = TypeVar("_Same", bound="Seen")


class Seen(Assembled):
    """The forward `fn` of a region, which notes that it ran. A tree that `transform` makes has `fn` without this."""

    fn: Callable[..., Any]
    ran = False

    def over(self: _Same, fn: Callable[..., Any]) -> _Same:
        """This over a forward."""
        self.fn = fn
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True  # without a look at what it was, by which a compiler would guard
        return self.fn(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def parts(self) -> tuple[Any, ...]:
        return (self.fn,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        return remap(self.fn)


class SeenRoot(Seen):
    """The root's forward, after `before` was told the arguments of the call."""

    def __init__(self, before: Callable[[Any, Any], None]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.ran = True
            self.before(args, kwargs)
        return self.fn(*args, **kwargs)


def idle(kind: str, plan: Plan, seen: Mapping[str, Seen]) -> str | None:
    """The patterns of `plan` none of whose regions, by their paths in `seen`, has run; None where each has one."""
    ran = [path for path, region in seen.items() if region.ran]
    # Of experts and of layers that are dropped at random, some rest in any one step.
    resting = [rule.pattern for rule in plan.of_functions() if not any(rule.matches(path) for path in ran)]
    if not seen or not resting:
        return None
    return (
        f"nothing ran of {', '.join(map(repr, resting))} in a training step of this {kind}, so that the plan "
        "saves nothing there: the loop calls other modules, or another forward took the place of theirs (a fused "
        "loss uses lm_head.weight itself); wrap what is called, or turn the fused forward off"
    )


def is_a_step_of_its_own(model: nn.Module) -> bool:
    """Whether a call of `model` here is one of a training loop, whose step can be simulated in the middle of it.

    It is not under `torch.func`, a tracer, a simulation, another mode that sees operators, or in a recompute; nor with
    parameters that somebody has put in place of the model's own. Nor in a process group, whose hooks on parameters
    would take the gradients of a simulated step for real ones.
    """
    return model.training and not (
        simulating()
        or functorch_state.active()
        or torch._C._current_graph_task_id() != -1
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or in_process_group()
        or any(not isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    )


class Listener(Protocol):
    """Who is told of steps."""

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
