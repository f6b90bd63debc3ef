"""Calls of a few chosen operators, seen without a dispatch mode: that takes microseconds at every operator and view.

An operator that somebody chose gets kernels of ours at two dispatch keys for which PyTorch has names and no kernels.
The one above autograd asks the watches, and the one below it gives autograd a result that a watch had instead of
computing it. Both keys take part only in calls of a thread that is inside a watch, and let other operators through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch

from memscale.core import found_once, internals
from memscale.regions.modes import dispatch_modes, only_watchers_since, without_outer_modes
from memscale.regions.uncompiled import never_compiled
from memscale.regions.unrecorded import is_unrecorded, unrecorded_depth

_c = torch._C
_NOTHING = nullcontext()
_NONE: tuple[Any, ...] = ()
_ABOVE, _BELOW = "TESTING_ONLY_GenericMode", "Fake"


class _Local(threading.local):
    def __init__(self) -> None:
        self.watches: list[ChosenWatch] = []
        self.inside = False  # a call that the watches have been asked about
        self.answer: tuple[internals.OpOverload, Any] | None = None  # to be given to autograd as its result


_local = _Local()


class ChosenWatch:
    """Inside it each call of one of `ops` is seen once, in the thread that entered it."""

    def __init__(self, ops: Collection[internals.OpOverload]) -> None:
        self.ops = ops
        self.modes_around: tuple[Any, ...] = ()
        self.depth = unrecorded_depth()
        self._guards: list[Any] = []

    def __enter__(self) -> Any:
        self.modes_around = dispatch_modes()
        _local.watches.append(self)
        self._guards = [_c._IncludeDispatchKeyGuard(key) for key in _keys()]
        for guard in self._guards:
            guard.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)
        _local.watches.remove(self)

    def before(self, op: internals.OpOverload) -> Any:
        """Called before `op`: the result that it is to have without being run, or `None`."""
        return None

    def after(self, op: internals.OpOverload, result: Any) -> None:
        """Called with what `op` gave, in so far as it is run or answered for inside this watch."""

    def lose(self) -> None:
        """Called when the watch has missed what it is there for, so that the next run is another's."""


@found_once
def _keys() -> tuple[Any, ...]:
    """The two dispatch keys; none in a PyTorch that has other uses for them."""
    library = torch.library.Library("_", "IMPL")
    _libraries.append(library)
    try:
        for name in (_ABOVE, _BELOW):
            library.fallback(torch.library.fallthrough_kernel, name)
        return _c._dispatch_key_parse(_ABOVE), _c._dispatch_key_parse(_BELOW)
    except (AttributeError, RuntimeError):
        return ()


_libraries: list[torch.library.Library] = []  # kept, since kernels end with their library
_known: set[internals.OpOverload] = set()
_lock = threading.Lock()


def can_choose(ops: Collection[internals.OpOverload]) -> bool:
    """Whether watches may choose `ops`, which is prepared here."""
    if not _keys():
        return False
    with _lock:
        for op in set(ops) - _known:
            library = torch.library.Library("aten", "IMPL")
            for name, key, kernel in zip((_ABOVE, _BELOW), _keys(), (_asking, _answering), strict=True):
                library.impl(op, kernel(op, _c._dispatch_keyset_full_after(key)), name, with_keyset=True)
            _libraries.append(library)
            _known.add(op)
    return True


def _asking(op: internals.OpOverload, later: Any) -> Callable[..., Any]:
    @never_compiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        local = _local
        # Operators that kernels call are no operators of the region. Nor do they tell of a change in place.
        if local.inside or _is_below_autograd():
            return op.redispatch(keys & later, *args, **kwargs)
        asked, answer, hidden_modes = [], None, _NONE
        for watch in reversed(local.watches):
            if op in watch.ops and not is_unrecorded(watch.depth) and only_watchers_since(watch.modes_around):
                if (answer := watch.before(op)) is not None:
                    hidden_modes = watch.modes_around
                    break
                asked.append(watch)
        local.inside, local.answer = True, None if answer is None else (op, answer)
        try:
            # Operators go to modes before they go to the key below. Those around the watch are to see none that is not
            # run: they count operators, or simulate them.
            with without_outer_modes(hidden_modes) if hidden_modes else _NOTHING:
                result = op.redispatch(keys & later, *args, **kwargs)
        finally:
            local.inside, local.answer = False, None
        for watch in asked:
            watch.after(op, result)
        return result

    return kernel


def _is_below_autograd() -> bool:
    return _c._dispatch_tls_is_dispatch_key_excluded(_c.DispatchKey.AutogradFunctionality)


def _answering(op: internals.OpOverload, later: Any) -> Callable[..., Any]:
    @never_compiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        answer = _local.answer
        if answer is None or answer[0] is not op:
            return op.redispatch(keys & later, *args, **kwargs)
        _local.answer = None
        return answer[1]

    return kernel
