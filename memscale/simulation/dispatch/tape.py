"""`Tape`: the operators of one simulated step with the layouts of their tensors, so that they can run for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from memscale.simulation.kernels.shapes import exchanged, results_of, tensors_in

# Operators of these namespaces communicate with other processes, or with a profiler.
_NOT_TAPED = ("c10d", "_c10d_functional", "c10d_functional", "profiler")


class Slot(NamedTuple):
    """A tensor of a taped call: the number of its storage in the trace, and its layout in this storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class TapedCall(NamedTuple):
    """A call of an operator, with a `Slot` in place of each tensor among its arguments and results."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]


@dataclass
class Tape:
    """The calls of a step.

    Args:
        number: returns the number of the storage under a tensor.

    Attributes:
        calls: index of an operator in the trace -> its call; without operators on sparse tensors or without data.
        values: number of a storage -> its contents, where these are known integers.
    """

    number: Callable[[torch.Tensor], int]
    calls: dict[int, TapedCall] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    _begun: tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None = None

    def begins(self, op: OpOverload, args: Any, kwargs: Any, known: Sequence[bool]) -> None:
        """Notes the call that is about to run, and for each tensor among its arguments whether the values are known."""
        self._begun = None
        tensors = tensors_in(args, kwargs)
        if op.namespace in _NOT_TAPED or any(tensor.layout is not torch.strided for tensor in tensors):
            return
        for tensor, is_known in zip(tensors, known, strict=True):
            if is_known and not tensor.is_floating_point() and not tensor.is_complex():
                self._keep(tensor)
        slots = {id(tensor): self._slot(tensor) for tensor in tensors}
        self._begun = op, exchanged(tuple(args), slots), exchanged(kwargs, slots)

    def ends(self, op: OpOverload, at: int, result: Any) -> None:
        """Notes the results of `op`, number `at` of the trace; without effect if another operator began last."""
        if self._begun is not None and self._begun[0] is op:
            self.calls[at] = TapedCall(*self._begun, tuple(map(self._slot, results_of(result))))
        self._begun = None

    def _slot(self, tensor: torch.Tensor) -> Slot:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Slot(self.number(tensor), shape, stride, int(tensor.storage_offset()), tensor.dtype)

    def _keep(self, tensor: torch.Tensor) -> None:
        number = self.number(tensor)
        if number not in self.values:
            with _disable_current_modes():
                whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage())
                self.values[number] = whole.clone()
