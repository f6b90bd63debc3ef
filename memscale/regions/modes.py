"""The stacks of PyTorch modes that a region ran under, such as a default device, which decide what operators do.

A recompute runs under the modes of the forward: a mode that has been exited since is active again, and a mode that was
entered since is inactive. Modes that only observe (FLOP counters, recorders of memscale) are left as they are at the
time of the recompute. Composite operators decompose differently as soon as any dispatch mode is active (`add` for
`add_`, in `linear` and in attention). So if the forward ran under a dispatch mode, the recompute runs at least under
one that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memscale.core import internals
from memscale.regions.uncompiled import OperatorWatch

_c = torch._C
_function_modes = internals.named("torch.overrides._get_current_function_mode_stack")
_dispatch_modes = internals.named("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_push_mode = internals.named("torch.utils._python_dispatch._push_mode")
_pop_mode = internals.named("torch.utils._python_dispatch._pop_mode")
_WATCHING = ("memscale.", "torch.utils.", "torch.distributed.", "torch.testing.")


class _Passing(OperatorWatch):
    """Runs each operator as it is."""

    keeps_compiled = True

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Modes(NamedTuple):
    """The stacks of modes, outermost first, without the dispatch modes that only observe.

    Observing modes are left out because a region would keep them, and the tensors in them, alive until its backward;
    a `Writes` mode holds the copies of another region.
    """

    function: tuple[Any, ...]
    dispatch: tuple[Any, ...]
    dispatched: bool  # whether any dispatch mode was active, observing ones included

    def enter(self, undo: list[Callable[[], Any]], now: Modes) -> None:
        """Switches to these modes. Appends to `undo` the calls that restore the present modes, which are `now`."""
        if not _same(now.function, self.function):
            undo.append(lambda: _set_function(now.function))
            _set_function(self.function)
        present = dispatch_modes()
        watching = [mode for mode in present if _watches(mode)]
        then = self.dispatch
        if self.dispatched and not then and not watching:
            then = (_Passing(),)
        if not _same(then, now.dispatch):
            undo.append(lambda: _set_dispatch(present))
            _set_dispatch((*then, *watching))


_NONE = Modes((), (), False)


def modes() -> Modes:
    """Returns the modes that are active in this thread."""
    functions, dispatches = _function_modes(), dispatch_modes()
    if not functions and not dispatches:
        return _NONE
    return Modes(
        tuple(functions),
        tuple([mode for mode in dispatches if not _watches(mode)]),
        bool(dispatches),
    )


def dispatch_modes() -> tuple[Any, ...]:
    """Returns the active dispatch modes of this thread, outermost first."""
    return tuple(_dispatch_modes())


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _watches(mode: Any) -> bool:
    return f"{type(mode).__module__}.".startswith(_WATCHING) and type(mode) is not _Passing


def _set_function(stack: tuple[Any, ...]) -> None:
    for _ in _function_modes():
        _c._pop_torch_function_stack()
    for mode in stack:
        _c._push_on_torch_function_stack(mode)


def _set_dispatch(stack: tuple[Any, ...]) -> None:
    # Referenced here, since PyTorch 2.10 crashes when the stack holds the only reference to a mode that is popped.
    leaving = dispatch_modes()
    for _ in leaving:
        _pop_mode()
    for mode in stack:
        _push_mode(mode)
