"""Transforms put on an optimizer itself, for a while: it stays the object that loops, schedulers and scalers have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memscale.algebra import Transform
from memscale.core import TransformError
from memscale.optimizers.assigned import assigned_by_rules
from memscale.optimizers.parts import PartedOptimizer, parameters_of
from memscale.optimizers.separability import check_separable, made_of
from memscale.optimizers.spent import SpentGradient
from memscale.optimizers.transformed import TransformedOptimizer, class_for


class InPlace:
    """`optimizer` under a plan's rules, until `undo`: each parameter's path, itself, its transforms, innermost first.

    Raises:
        TransformError: its class cannot be stepped one parameter at a time, it is under transforms already, or its
            ``step`` was replaced by something other than a scheduler's; or rules contradict each other.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rules: Sequence[tuple[str, torch.Tensor, Sequence[Transform]]]
    ) -> None:
        assigned = assigned_by_rules(rules)
        name = type(optimizer).__name__
        if isinstance(optimizer, TransformedOptimizer):
            raise TransformError(f"this {name} is under {optimizer!r} already; pass the optimizer that it was made of")
        evidence = check_separable(optimizer, assigned.shown(parameters_of(optimizer.param_groups)))
        step = optimizer.__dict__.get("step")
        # That of a scheduler of learning rates calls the step of the class; of others nobody knows what they do.
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            raise TransformError(
                f"the step of this {name} was replaced by {getattr(step, '__qualname__', step)!r}, which may do "
                "without that of the class; apply the transform first"
            )
        self._own_class = type(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._is_over = False
        made: Any = optimizer
        made.__class__ = class_for(type(optimizer))
        made._origins, made._shared, made.parts = (), set(), []
        self._hook = optimizer.register_step_pre_hook(_stepped_by_its_class)
        try:
            made._begin(assigned, evidence)
        except BaseException:
            self.undo()
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, None if it is gone."""
        return self._optimizer()

    def undo(self) -> None:
        """Give the optimizer its own step back, with the states that it has by now; nothing the second time."""
        optimizer: Any = self._optimizer()
        if self._is_over or optimizer is None:
            return
        self._is_over = True
        try:
            below = {id(tensor) for tensor in optimizer.below()}
            with optimizer._gathered():
                states = {
                    parameter: {
                        key: _on_its_device(key, value, parameter, group, below)
                        for key, value in optimizer._plain_states(parameter).items()
                    }
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                    if parameter in optimizer.state
                }
            optimizer.state.update(states)
        finally:
            optimizer.let_go()
            self._hook.remove()
            for parameter in parameters_of(optimizer.param_groups):
                if isinstance(parameter.grad, SpentGradient):
                    parameter.grad = None
            for key in PartedOptimizer.__annotations__:
                optimizer.__dict__.pop(key, None)
            optimizer.__class__ = self._own_class


def _stepped_by_its_class(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called before each step. One that was taken from the optimizer before is the class's.

    A scheduler of learning rates takes it, and so does ``step = optimizer.step``. It would step parameters by states
    that are elsewhere, or in 8 bits. The step here takes its place, and leaves it an optimizer of nothing.
    """
    # A plain copy, as a planner makes, has the hooks too.
    if not isinstance(optimizer, TransformedOptimizer) or optimizer._is_stepping:
        return None
    loss = TransformedOptimizer.step(optimizer, *args[1:], **kwargs)
    empty = [{**group, "params": []} for group in optimizer.param_groups]
    nothing = made_of(optimizer._own_class, optimizer.__dict__, state={}, param_groups=empty)
    return (nothing, *([] if loss is None else [lambda: loss])), {}


def counts_on_host(group: dict[str, Any]) -> bool:
    """Whether an optimizer of PyTorch counts the steps of this group of parameters on the CPU, wherever they are."""
    return not (group.get("capturable") or group.get("fused"))


def _on_its_device(key: str, value: Any, parameter: torch.Tensor, group: dict[str, Any], below: set[int]) -> Any:
    """A state on the device where the optimizer itself has it."""
    if not isinstance(value, torch.Tensor):
        return value
    moves = not counts_on_host(group) if key == "step" else value.dim() > 0
    found = value.to(parameter.device) if moves else value
    return found.clone() if found is value and id(value) in below else found
