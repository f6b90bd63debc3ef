"""Decides which functions are projections: linear in the last dimension of their one input, row by row.

The function is run once on fake tensors and its operators are checked, so that a head with adapters or a scaled head
qualifies as well as `nn.Linear`, and no architecture is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale.algebra import OwnForward
from memscale.core import TransformError, internals, pytrees
from memscale.regions import ArgumentSpec, Captures, Environment, holds
from memscale.transforms.checkpoint import Checkpointed
from memscale.transforms.tile.numbers import arguments_of, spelled
from memscale.transforms.tile.unfit_regions import names

# Operators that are linear in the rows; of two factors only the listed one may hold rows. Dropout (of an adapter) is
# not among them, because it would draw another mask in each use of the logits.
_LINEAR = {"aten::add", "aten::add_", "aten::sub", "aten::_to_copy", "aten::clone"}
_PRODUCTS = {
    "aten::mm": (1,),
    "aten::addmm": (2,),
    "aten::mul": (0, 1),
    "aten::mul_": (1,),
    "aten::div": (1,),
    "aten::div_": (1,),
}  # the positions of arguments, of which at least one must not depend on the rows

_HOOKS = [key for key in nn.Module().__dict__ if key.endswith("_hooks") and "state_dict" not in key]


def plain_linear(fn: Callable[..., Any], captures: Captures) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Returns weight and bias if `fn`, whose captures are given, is the forward of one `nn.Linear` alone."""
    while isinstance(fn, Checkpointed):
        fn = fn.fn
    # By identity of the module. `__wrapped__` is also set by casts and by `functools.wraps`, which compute something
    # else, and ``lambda x: relu(linear(x))`` captures the same modules.
    module = fn.module if isinstance(fn, OwnForward) else fn
    if len(captures.modules) != 1 or module is not captures.modules[0] or type(module).forward is not nn.Linear.forward:
        return None
    patched = "forward" in module.__dict__ or any(module.__dict__[hooks] for hooks in _HOOKS)
    if fn.patched is not None if isinstance(fn, OwnForward) else patched:
        return None
    held = {key: tensor for _, key, tensor in captures.tensors}
    if held.keys() - {"weight", "bias"} or "weight" not in held:
        return None
    return held["weight"], held.get("bias")


def is_projection(fn: Callable[..., Any], hidden: torch.Tensor) -> bool:
    """Whether ``fn(hidden)`` is a projection of the last dimension. `fn` runs on fake tensors only."""
    captures = Captures(fn, follows=True)
    if plain_linear(fn, captures) is not None:
        return True
    if not captures.modules or any(module.__dict__[hooks] for module in captures.modules[1:] for hooks in _HOOKS):
        return False  # a hook may keep its arguments
    if names([fn, *captures.modules], "register_hook"):
        return False  # a gradient hook would see the gradients of pieces
    try:
        objects = ArgumentSpec((captures.contents,), {}, None, hold=True)
    except TransformError:  # too many objects to restore
        return False
    tables = [module.__dict__[hooks] for module in captures.modules for hooks in _HOOKS]
    registered = [dict(table) for table in tables]
    environment = Environment({hidden.device}, host_random=True, generators=captures.generators)
    seen = set()
    known = [tensor for _, _, tensor in captures.tensors]
    for rows in (6, 7):  # twice, so that a size which happens to equal the number of rows shows as a difference
        try:
            # Without the caller's modes, which must neither see this run nor count its operators.
            with (
                _quiet(),
                no_casts_kept(),
                internals.disable_current_modes(),
                _fake_mode([hidden, *known]),
                torch.no_grad(),
                environment.reinstate(),
            ):
                sample = torch.empty(rows, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
                with (watch := _OnlyLinear(sample)), _NothingTouched():
                    out = environment.context.copy().run(fn, sample)
                # A projection that draws random numbers or stores a value would do so at another time, or more often.
                if environment.has_drawn() or not all(map(holds, captures.slots, captures.contents)):
                    return False
        except (Exception, _NotLinear):  # a function that fails on two dimensions is no projection
            return False
        finally:
            captures.restore()
            objects.rebuild(objects.tensors, [])
            for table, then in zip(tables, registered, strict=True):
                if len(table) != len(then):
                    table.clear()
                    table.update(then)
        if not isinstance(out, torch.Tensor) or out.dim() != 2 or out.shape[0] != rows:
            return False
        seen.add((out.shape[1], *watch.calls))
    return len(seen) == 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the logs of fake tensors: a region that fails on two dimensions is an expected answer."""
    log = logging.getLogger(internals.FakeTensor.__module__)
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


@contextmanager
def no_casts_kept() -> Iterator[None]:
    """Disables autocast's cache, which would keep a cast of a weight from the body for the caller's run."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _fake_mode(tensors: list[torch.Tensor]) -> internals.FakeTensorMode:
    for tensor in tensors:
        if isinstance(tensor, internals.FakeTensor):
            return tensor.fake_mode
    return internals.FakeTensorMode(allow_non_fake_inputs=True)


class _NotLinear(BaseException):
    """Ends the run at the first operator that is not linear; a BaseException, so that user code does not catch it."""


class _NothingTouched(TorchFunctionMode):
    """Raises `_NotLinear` before a tensor's memory is exported or replaced, which no operator shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _TOUCHING:
            raise _NotLinear
        return func(*args, **(kwargs or {}))


# `__set__` is an assignment to an attribute: ``weight.data = ...`` would put a fake tensor into the user's model.
_TOUCHING = {
    "__set__",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "numpy",
    "requires_grad_",
    "share_memory_",
    "storage",
    "untyped_storage",
}


class _OnlyLinear(internals.TorchDispatchMode):
    """Raises `_NotLinear` at an operator that is not linear in the rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dependent = {id(rows): rows}  # kept alive, so that no other tensor gets the same id
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        dependent = any(id(value) in self._dependent for value in pytrees.flatten((args, kwargs))[0])
        fixed = [position for position in _PRODUCTS.get(name, ()) if id(args[position]) not in self._dependent]
        if dependent and not (func.is_view or name in _LINEAR or fixed or name == "prim::device"):
            raise _NotLinear
        if torch.Tag.nondeterministic_seeded in func.tags:  # on fake tensors the generator does not show it
            raise _NotLinear
        given = arguments_of(func, args, kwargs or {})
        self.calls.append(spelled(func, given))
        # Raised before the operator runs: fake tensors update small real constants, so a counter would count.
        if func._schema.is_mutable:
            written = [given.get(argument.name) for argument in func._schema.arguments if argument.is_write]
            if any(id(value) not in self._dependent for value in pytrees.flatten(written)[0]):
                raise _NotLinear
        result = func(*args, **(kwargs or {}))
        if dependent:
            self._dependent.update((id(value), value) for value in pytrees.flatten(result)[0])
        return result
