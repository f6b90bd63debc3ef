"""Sums and products that PyTorch makes in place where no dispatch mode is active, and out of place under one."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from memscale.simulation.dispatch.live_storages import LiveStorages
from memscale.simulation.dispatch.trace_builder import Sum
from memscale.simulation.kernels.cuda_autocast import below
from memscale.simulation.kernels.kernels import linear
from memscale.simulation.trace import Phase

aten = torch.ops.aten

# The formula of this derivative multiplies and subtracts in place, except into its first operand, a tensor of others.
# Source: ``binary_cross_entropy_with_logits_backward`` in FunctionsManual.cpp.
_FORMULAS = {"BinaryCrossEntropyWithLogitsBackward0"}
_ZEROS = {"aten::zeros", "aten::new_zeros", "aten::zeros_like"}
# The frame of an operator that Python calls, as a dispatch mode does when it redispatches.
_CALLED = type(aten.add.Tensor).__call__.__code__


class InPlaceSums:
    """A detector of a step's in-place sums, which `TraceBuilder.add_in_place` later makes happen in place.

    Args:
        storages: the live storages of the step.
    """

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages
        self._builder = storages.builder
        self._sum: Sum | None = None  # the last candidate

    def maybe_in_place(
        self, op: OpOverload, operands: list[torch.Tensor], total: torch.Tensor, first_of_node: int
    ) -> None:
        """Notes a sum that PyTorch makes in place where no mode is active: the autograd engine's, or attention's.

        `first_of_node` is the index of the first operator of the running autograd node.
        """
        self._sum = None
        if op is aten.mul.Tensor or op is aten.sub.Tensor:
            if torch.is_grad_enabled():
                return
            node = torch._C._current_autograd_node()
            if node is None or node.name() not in _FORMULAS:
                return
            if total.numel() == operands[0].numel() and self._is_of_backward(operands[0]):
                self._builder.sums.append(replace(self._noted(operands[0], total), always=True))
            return
        frame: Any = sys._getframe(1)
        within = frame.f_code.co_filename
        while frame.f_code.co_filename == within:  # skip the dispatch mode's frames up to the caller of the sum
            frame = frame.f_back
        if (
            by_autocast := frame.f_code is _CALLED
            and frame.f_back is not None
            and frame.f_back.f_code is below.__code__
        ):
            frame = frame.f_back
        # A mode above the simulation's is active in a real step too: it watches the writes of a region's first run.
        if len(operands) < 2 or frame.f_code is _CALLED:
            return
        self._sum = self._noted(operands[0], total)
        # The engine adds where two gradients of one value meet; a backward in Python and users add out of place.
        caller = frame.f_code
        if caller is linear.__code__ or (by_autocast and frame.f_locals["op"] is aten.linear.default):
            self._builder.sums.append(self._sum)  # `linear` adds a bias to its own product in place
            return
        by_engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if not by_engine or caller.co_name != "_engine_run_backward":
            return
        # The engine adds into the first gradient only if that is dense and unshared; a view shares its base's storage.
        if operands[0]._is_view() or not aten.is_non_overlapping_and_dense(operands[0]):
            return
        born = self._storages.record(operands[0]).op
        if op is aten.add.Tensor:
            # The engine adds a gradient of this node to one from another node, or to another gradient of this node for
            # the same value. Any other sum of tensors that the node has made is a part of the node's formula.
            is_in_place = born < first_of_node or _gives_twice(torch._C._current_autograd_node())
        else:
            # A formula writes in place into zeros that it has made, and never into a gradient (`index_put`, `scatter`).
            is_in_place = born >= first_of_node and self._builder.ops[born].name in _ZEROS
        if is_in_place:
            self._builder.sums.append(self._sum)

    def _is_of_backward(self, tensor: torch.Tensor) -> bool:
        born = self._storages.record(tensor).op
        return born >= 0 and self._builder.ops[born].phase is Phase.BACKWARD

    def _noted(self, first: torch.Tensor, total: torch.Tensor) -> Sum:
        operand, number = map(self._storages.number, (first, total))
        born = len(self._builder.events) - 1
        while self._builder.events[born] != number + 1:  # scratch memory dies after the result is born
            born -= 1
        return Sum(born, operand, number)

    def mask_added_in_place(self, scores: torch.Tensor) -> None:
        """Notes that the last sum was attention's, of `scores` and mask: a safe softmax follows no other sum."""
        if self._sum is not None and self._sum.total == self._storages.number(scores):
            self._builder.sums.append(self._sum)


def _gives_twice(node: Any) -> bool:
    """Whether two of the gradients that `node` returns belong to one value."""
    return node is not None and len(set(node.next_functions)) < len(node.next_functions)
