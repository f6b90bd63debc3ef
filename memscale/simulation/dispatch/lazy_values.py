"""Lazy values: values too large to compute at every step, computed when the step reads them.

A model may ask about its positions or its mask (does a sequence begin twice? is nothing padded?) and branch by the
answer: one number, of tensors as large as the batch. So an operator with known arguments records how to compute its
result; the simulation computes it where the step reads a number of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memscale.core import MemscaleError, OpOverload
from memscale.simulation.kernels.shapes import exchanged
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.rules.registry import rule_of

# Limits: bytes of one computed tensor, of a value kept for the next read, and of a copied constant.
_LARGEST_BYTES = 1 << 30
_LARGEST_KEPT_BYTES = 1 << 24
_LARGEST_COPY_BYTES = 1 << 20


class TooLarge(Exception):
    """The values take more than the allowed memory."""


class NeedsValues(MemscaleError):
    """The step reads values that a simulation does not compute; `path` names the module."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(f"{reason}{f' (in {path})' if path else ''}")
        self.reason = reason
        self.path = path


@dataclass(eq=False, slots=True)
class LazyValue:
    """The result of an operator, as the call that computes it.

    Attributes:
        op, args, kwargs: the call, with each tensor replaced by a `_Seen`.
        layout: dtype, shape, strides and offset of the result over its storage.
        before: the whole storage before `op` wrote to its first argument; None for an operator that makes its result.
    """

    op: OpOverload
    args: Any
    kwargs: Any
    layout: _Layout
    before: _Seen | None = None
    _value: torch.Tensor | None = field(default=None, repr=False)

    def value(self, seen: dict[LazyValue, torch.Tensor]) -> torch.Tensor:
        """Returns the result; `seen` has the values that this evaluation has computed."""
        if self._value is not None:
            return self._value
        if self not in seen:
            args = _values(self.args if self.before is None else self.args[1:], seen)
            kwargs = _values(self.kwargs, seen)
            if self.before is None:
                value = _run(self.op, args, kwargs, self.layout[1])
            else:
                value = self.before.value(seen).clone()
                self.op(FakeStorages.tensor(value.untyped_storage(), *self.args[0].layout), *args, **kwargs)
            seen[self] = value
            if value.untyped_storage().nbytes() <= _LARGEST_KEPT_BYTES:
                self._value = value
        return seen[self]


_Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


@dataclass(eq=False, slots=True)
class _Seen:
    """A tensor as an operator saw it: its layout, over contents that are known or computed later."""

    contents: LazyValue | torch.UntypedStorage | Callable[[], torch.UntypedStorage | None]
    layout: _Layout

    def value(self, seen: dict[LazyValue, torch.Tensor]) -> torch.Tensor:
        dtype, shape, stride, offset = self.layout
        if not isinstance(self.contents, LazyValue):
            storage = self.contents if isinstance(self.contents, torch.UntypedStorage) else self.contents()
            if storage is None:
                raise TooLarge
            return FakeStorages.tensor(storage, dtype, shape, stride, offset)
        value = self.contents.value(seen)
        if self.layout == self.contents.layout:
            return value
        _, whole, strides, first = self.contents.layout
        _check(value.dtype, whole)
        if value.stride() != strides:
            value = torch.empty_strided(whole, strides, dtype=value.dtype).copy_(value)
        return FakeStorages.tensor(
            value.untyped_storage(), dtype, shape, stride, offset - first + int(value.storage_offset())
        )


def lazy_value(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    tensors: Sequence[torch.Tensor],
    contents: Sequence[LazyValue | None] | None,
    result: torch.Tensor,
) -> LazyValue:
    """Returns the lazy value of `result`, which `op` returned for `tensors`.

    Args:
        contents: the lazy contents of the tensors' storages, with None for real contents; None if no values matter.
    """
    if contents is None:
        views = {id(tensor): _shape_of(tensor) for tensor in tensors}
    else:
        views = {
            id(tensor): _Seen(_contents(tensor.untyped_storage()) if content is None else content, _layout(tensor))
            for tensor, content in zip(tensors, contents, strict=True)
        }
    return LazyValue(op, exchanged(args, views), exchanged(kwargs, views), _layout(result))


def overwritten(
    op: OpOverload, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], contents: Sequence[LazyValue | None]
) -> LazyValue:
    """Returns the lazy value of the storage of ``args[0]`` after `op` has written to it; `contents` are from before."""
    storage, dtype = args[0].untyped_storage(), args[0].dtype
    whole = FakeStorages.tensor(storage, dtype, (storage.nbytes() // dtype.itemsize,), (1,))
    written = lazy_value(op, args, kwargs, tensors, contents, whole)
    written.before = _Seen(written.args[0].contents, written.layout)
    return written


def value_of(tensor: torch.Tensor, contents: LazyValue) -> torch.Tensor:
    """Returns the values of `tensor`, whose storage has `contents`.

    Raises:
        TooLarge: the values would take too much memory, or an argument is gone.
    """
    return _Seen(contents, _layout(tensor)).value({})


def stands_in(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a scalar, for which a value can stand in."""
    return tensor.numel() == 1 and (tensor.dtype == torch.bool or tensor.is_floating_point())


def _contents(storage: torch.UntypedStorage) -> torch.UntypedStorage | Callable[[], torch.UntypedStorage | None]:
    """Returns a copy of small contents, and a weak reference to large ones, whose deaths the trace records."""
    return storage.clone() if storage.nbytes() <= _LARGEST_COPY_BYTES else weakref.ref(storage)


def _shape_of(tensor: torch.Tensor) -> _Seen:
    """Returns a tensor of the same shape and dtype that repeats one element."""
    return _Seen(torch.UntypedStorage(16), (tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), 0))


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _values(tree: Any, seen: dict[LazyValue, torch.Tensor]) -> Any:
    """Returns the arguments of a call with the tensors in place of each `_Seen`."""
    if isinstance(tree, _Seen):
        return tree.value(seen)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_values(item, seen) for item in tree])
    if isinstance(tree, dict):
        return {key: _values(item, seen) for key, item in tree.items()}
    return tree


def _run(op: OpOverload, args: Any, kwargs: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns ``op(*args, **kwargs)``, computed once for all rows that repeat one row (a batch of positions)."""
    if torch.Tag.pointwise not in op.tags and not rule_of(op).repeats:
        _check(torch.int64, shape)
        compute: Callable[..., torch.Tensor] = rule_of(op).computed or op
        return compute(*args, **kwargs)
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    dims = max((arg.dim() for arg in given), default=0)
    repeated = [dim for dim in range(-dims, 0) if all(_is_repeated(arg, dim) for arg in given)]
    for dim in repeated:
        args = [arg.narrow(dim, 0, 1) if _has(arg, dim) else arg for arg in args]
    _check(torch.int64, torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, torch.Tensor))))
    result: torch.Tensor = op(*args, **kwargs)
    return result.expand(shape)


def _has(arg: Any, dim: int) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() >= -dim and arg.shape[dim] > 1


def _is_repeated(tensor: torch.Tensor, dim: int) -> bool:
    return tensor.dim() < -dim or tensor.shape[dim] == 1 or (tensor.shape[dim] > 1 and tensor.stride(dim) == 0)


def _check(dtype: torch.dtype, shape: Sequence[int]) -> None:
    if _bounded and torch.Size(shape).numel() * dtype.itemsize > _LARGEST_BYTES:
        raise TooLarge


_bounded = True


@contextmanager
def of_any_size() -> Iterator[None]:
    """Lifts the size limits in the body."""
    global _bounded
    _bounded = False
    try:
        yield
    finally:
        _bounded = True
