"""The modes of PyTorch that a region ran under, such as a default device: they decide what its operators do.

A recompute runs under those of the forward: a mode that was left meanwhile is called again, one that is on only now is
not. Tools that only watch (counters of FLOPs, recorders of memscale) stay as they are: they count what runs where they
are on. Composite operators take other ways as soon as a dispatch mode is on (`add` for `add_`, in `linear` and in
attention), so that the recompute runs under one that does nothing if the forward ran under some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memscale.core import internals

_c = torch._C
_push_mode = internals.named("torch.utils._python_dispatch._push_mode")
_pop_mode = internals.named("torch.utils._python_dispatch._pop_mode")
_WATCHING = ("memscale.", "torch.utils.", "torch.distributed.", "torch.testing.")


class Modes(NamedTuple):
    """The stacks of modes, outermost first, without the dispatch modes that only watch.

    A region that kept those until its backward would keep what they hold: `Writes` has the copies of another region.
    """

    function: tuple[Any, ...]
    dispatch: tuple[Any, ...]
    dispatched: bool  # whether operators go to any dispatch mode

    def enter(self, undo: list[Callable[[], Any]]) -> None:
        """Go back to these modes; `undo` receives what returns to the present."""
        now = modes()
        if self is now:
            return
        if not _same(now.function, self.function):
            undo.append(lambda: _set_function(now.function))
            _set_function(self.function)
        present = dispatch_modes()
        watching = [mode for mode in present if _watches(mode)]
        then = self.dispatch
        if self.dispatched and not then and not watching:
            then = (internals.BaseTorchDispatchMode(),)
        if not _same(then, now.dispatch):
            undo.append(lambda: _set_dispatch(present))
            _set_dispatch((*then, *watching))


_NONE = Modes((), (), False)


def modes() -> Modes:
    """The modes that are on here now."""
    functions, dispatches = _c._len_torch_function_stack(), _c._len_torch_dispatch_stack()
    if not functions and not dispatches:
        return _NONE
    return Modes(
        tuple([_c._get_function_stack_at(index) for index in range(functions)]),
        tuple([mode for mode in dispatch_modes() if not _watches(mode)]),
        dispatches > 0,
    )


def dispatch_modes() -> tuple[Any, ...]:
    """Those that are on here now, outermost first."""
    return tuple([_c._get_dispatch_stack_at(index) for index in range(_c._len_torch_dispatch_stack())])


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _watches(mode: Any) -> bool:
    return f"{type(mode).__module__}.".startswith(_WATCHING) and type(mode) is not internals.BaseTorchDispatchMode


def _set_function(stack: tuple[Any, ...]) -> None:
    for _ in range(_c._len_torch_function_stack()):
        _c._pop_torch_function_stack()
    for mode in stack:
        _c._push_on_torch_function_stack(mode)


def _set_dispatch(stack: tuple[Any, ...]) -> None:
    # Held meanwhile: PyTorch frees a mode that nothing but its stack holds before it returns it (a crash on 2.10).
    leaving = dispatch_modes()
    for _ in leaving:
        _pop_mode()
    for mode in stack:
        _push_mode(mode)
