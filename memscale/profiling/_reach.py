"""Everything that a training step can reach: modules, tensors, optimizers, schedulers, the user's own objects."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from memscale.transforms._scope import _NOWHERE, Attributes, Scope

# Deeper or larger than this is data (a dataset, a tokeniser), which a training step reads and does not change.
_DEEPEST = 6
_MOST_OBJECTS = 20_000
_NOT_STATE = (type, nn.Module, torch.Tensor, torch.Generator, types.ModuleType, types.FunctionType, types.MethodType)


class Reach(Scope):
    """A `Scope` that also follows plain objects, since a step calls optimizers, schedulers and trainers.

    >>> layer = nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(layer.parameters())
    >>> reach = Reach(lambda: optimizer.step())
    >>> {id(tensor) for _, _, tensor in reach.tensors} == {id(layer.weight), id(layer.bias)}
    True
    """

    __slots__ = ("_depth", "_objects", "optimizers")

    def __init__(self, *roots: Any) -> None:
        self._depth = 0
        self._objects = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        super().__init__(roots)  # type: ignore[arg-type]  # a tuple of roots is visited part by part

    def _visit(self, thing: Any, home: dict[str, Any] | None) -> None:
        if self._depth > _DEEPEST:
            return
        self._depth += 1
        try:
            super()._visit(thing, home)
            if id(thing) not in self._seen and isinstance(getattr(thing, "__dict__", None), dict):
                self._visit_object(thing)
        finally:
            self._depth -= 1

    def _visit_object(self, thing: Any) -> None:
        if isinstance(thing, _NOT_STATE) or self._objects >= _MOST_OBJECTS:
            return
        self._seen.add(id(thing))
        self._objects += 1
        for value in self._add(Attributes(thing.__dict__, 0)).values():  # type: ignore[union-attr]
            if not isinstance(thing, torch.optim.Optimizer):
                self._visit(value, _NOWHERE)
        if isinstance(thing, torch.optim.Optimizer):
            self._visit_optimizer(thing)

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)
        self._add(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._add(group)
            self._add(group["params"])
        self._add(optimizer.state)
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self._add(state)
