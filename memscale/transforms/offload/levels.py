"""`offload` alone under `torch.func`: saved-tensor hooks that know its levels.

A tensor of a level of `grad` or `vmap` wraps one of the level below, down to the plain one that holds the bytes.
Autograd runs at every level of `grad`, and asks the hooks for a tensor of that level, with the history that its value
has in the levels below. So a wrapper is packed as what it wraps, and a value with a history as PyTorch would keep it:
in a saved tensor of its own level, under these same hooks. The bytes move at the bottom, where views of one storage
move once.

PyTorch refuses hooks in torch.func because ordinary ones lose just this; the refusal is lifted while the region runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import internals
from memscale.regions import never_compiled, without_levels_above
from memscale.runtime import Hooks

_functorch = internals.functorch
_autograd = internals.autograd


@contextmanager
def hooks_allowed() -> Iterator[None]:
    """Let the body use saved-tensor hooks inside a transform of `torch.func`."""
    refusal = _autograd._saved_tensors_hooks_get_disabled_error_message()
    _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if refusal is not None:
            _autograd._saved_tensors_hooks_disable(refusal, False)


class LevelHooks:
    """`hooks` for the tensors of every level that runs where this is made."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        # Hooks are called in the middle of an operator, where dispatch leaves out what an operator has behind it.
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with without_levels_above(0):
            empty = torch.empty(0)
        self._witnesses = {  # by level, a wrapper that says whether the level still runs: numbers are used again
            level.level(): _functorch._wrap_for_grad(empty, level.level())
            for level in _functorch.get_interpreter_stack()
            if level.key() == _functorch.TransformType.Grad
        }

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        tensor = _functorch.unwrap_if_dead(tensor)
        with torch._C._ForceDispatchKeyGuard(*self._keys):
            if _functorch.peek_interpreter_stack() is None:
                _functorch._set_dynamic_layer_keys_included(False)
            if not _functorch.is_functorch_wrapped_tensor(tensor):
                with without_levels_above(0):
                    return self._hooks.pack(tensor)
            level, inner = _functorch.maybe_get_level(tensor), self._value(_functorch.get_unwrapped(tensor))
            if _functorch.is_batchedtensor(tensor):
                return _Batched(level, _functorch.maybe_get_bdim(tensor), inner)
            return _Wrapped(level, self._witnesses[level], inner)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _WithHistory:
            back: torch.Tensor = packed.kept.saved_tensors[0]
            return back
        if type(packed) is _Batched:
            return _functorch._add_batch_dim(self.unpack(packed.inner), packed.dim, packed.level)
        if type(packed) is _Wrapped:
            inner = self.unpack(packed.inner)
            if _functorch.unwrap_if_dead(packed.witness) is packed.witness:
                return _functorch._wrap_for_grad(inner, packed.level)
            # The level is gone, as in the function that `vjp` returns: a wrapper of any level that is gone will do.
            level = _functorch._grad_increment_nesting()
            try:
                return _functorch._wrap_for_grad(inner, level)
            finally:
                _functorch._grad_decrement_nesting()
        with without_levels_above(0):
            return self._hooks.unpack(packed).detach()  # another object than what the engine holds

    def leave(self) -> None:
        with without_levels_above(0):
            self._hooks.leave()

    def _value(self, tensor: torch.Tensor) -> Any:
        """`tensor` packed, with its history at its own level; a batch has its history below."""
        if not tensor.requires_grad or _functorch.is_batchedtensor(tensor):
            return self.pack(tensor)
        kept: list[Any] = []
        allowed = _functorch.get_single_level_autograd_function_allowed()
        with without_levels_above(max(_functorch.maybe_get_level(tensor), 0)), torch.enable_grad():
            _functorch.set_single_level_autograd_function_allowed(True)
            try:
                node_of = _Keep.apply(tensor, kept)  # type: ignore[attr-defined]
            finally:
                _functorch.set_single_level_autograd_function_allowed(allowed)
        return _WithHistory(kept[0], node_of)


class _Keep(internals.SingleLevelFunction):
    """Makes a saved tensor: the edge to the tensor's own history, and its bytes where the hooks put them.

    An operator of ours in between would sum gradients of higher order in another order: other numbers by a rounding.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        kept.append(ctx)
        return tensor.new_empty(0)


class _WithHistory:
    __slots__ = ("kept", "node_of")

    def __init__(self, kept: Any, node_of: torch.Tensor) -> None:
        self.kept = kept
        self.node_of = node_of  # before torch 2.13, `kept` alone does not keep its node, and with that what it saved


class _Wrapped:
    __slots__ = ("inner", "level", "witness")

    def __init__(self, level: int, witness: torch.Tensor, inner: Any) -> None:
        self.level, self.witness, self.inner = level, witness, inner


class _Batched:
    __slots__ = ("dim", "inner", "level")

    def __init__(self, level: int, dim: int, inner: Any) -> None:
        self.level, self.dim, self.inner = level, dim, inner
