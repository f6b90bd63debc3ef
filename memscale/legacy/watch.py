"""What runs of a wrapped model: calls of its root (`Watch`) and of its regions (`Seen`), and words for what did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import Assembled, in_process_group, simulating
from memscale.regions import functorch_state

_Same = TypeVar("_Same", bound="_Over")


class _Over(Assembled):
    """`fn`, a forward that is looked at. A tree that `transform` makes has a plan of its own, and `fn` without this."""

    fn: Callable[..., Any]
    ran = False  # whether it was called

    def over(self: _Same, fn: Callable[..., Any]) -> _Same:
        """This over a forward."""
        self.fn = fn
        return self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def parts(self) -> tuple[Any, ...]:
        return (self.fn,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        return remap(self.fn)


class Watch(_Over):
    """The root's forward, after `before` was told the arguments of the call, which may change it."""

    def __init__(self, before: Callable[[Any, Any], None]) -> None:
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.ran = True
            self.before(args, kwargs)
        return self.fn(*args, **kwargs)


class Seen(_Over):
    """A region of a plan, which notes that it ran."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True  # without a look at what it was, by which a compiler would guard
        return self.fn(*args, **kwargs)


def never_called(kind: str) -> str:
    """Of a model of this class without a batch to plan for, whose optimizer made a step all the same."""
    return (
        f"wrap() saw no call of this {kind}'s forward in a training step, so that nothing was planned; "
        "wrap the module whose forward the loop calls, or pass sample_input=..."
    )


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
    return not (
        simulating()
        or functorch_state.active()
        or torch._C._current_graph_task_id() != -1
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or in_process_group()
        or any(not isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    )
