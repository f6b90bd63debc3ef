"""`Watch`: the forward of a wrapped model, through which its executor sees what it is called with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from memscale.algebra import OwnForward
from memscale.core import Assembled, simulating
from memscale.regions import functorch_state

_Same = TypeVar("_Same", bound="_Over")


class _Over(Assembled):
    """`fn`, a forward that is looked at. A tree that `transform` makes has a plan of its own, and `fn` without this."""

    fn: Callable[..., Any]

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
            self.before(args, kwargs)
        return self.fn(*args, **kwargs)


class Seen(_Over):
    """A region of a plan, which notes that it ran."""

    def __init__(self) -> None:
        self.ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True  # without a look at what it was, by which a compiler would guard
        return self.fn(*args, **kwargs)


class Gate(OwnForward):
    """The root's own forward while its step is simulated: other threads wait until that is over."""

    def __init__(self, module: nn.Module, patched: Callable[..., Any] | None, lock: threading.RLock) -> None:
        super().__init__(module, patched)
        self.lock = lock
        self.thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self.thread:
            return super().__call__(*args, **kwargs)
        with self.lock:
            pass
        return self.module(*args, **kwargs)


def is_a_step_of_its_own(model: nn.Module) -> bool:
    """Whether a call of `model` here is one of a training loop, whose step can be simulated in the middle of it.

    It is not under `torch.func`, a tracer, a simulation, another mode that sees operators, or in a recompute; nor with
    parameters that somebody has put in place of the model's own. Nor in a process group, whose hooks on parameters
    would take the gradients of a simulated step for real ones.
    """
    groups = torch.distributed
    return not (
        simulating()
        or functorch_state.active()
        or torch._C._current_graph_task_id() != -1
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or (groups.is_available() and groups.is_initialized())
        or any(not isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    )
