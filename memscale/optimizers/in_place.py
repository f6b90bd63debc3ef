"""`InPlace`: puts transforms on an existing optimizer object and removes them, for `wrap` and `detach`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memscale.algebra import Transform
from memscale.core import TransformError
from memscale.optimizers.assigned import assigned_by_rules
from memscale.optimizers.separability import check_separable, made_of
from memscale.optimizers.spent import SpentGradient
from memscale.optimizers.step_parts import PartedOptimizer, parameters_of
from memscale.optimizers.transformed import TransformedOptimizer, class_for


class InPlace:
    """Puts an optimizer under a plan's rules, in place, until `undo`.

    Loops, schedulers and scalers hold the optimizer object, so its class is replaced and the object stays.

    Args:
        optimizer: the optimizer to change.
        rules: for each parameter its path, the parameter, and its transforms from the innermost to the outermost.

    Raises:
        TransformError: the optimizer cannot be stepped one parameter at a time, or is under transforms already, or its
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
        # A learning-rate scheduler's wrapper calls the step of the class; what other wrappers do is unknown.
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            raise TransformError(
                f"the step of this {name} was replaced by {getattr(step, '__qualname__', step)!r}, which may "
                "skip the step of the class; apply the transform before the replacement"
            )
        self._own_class = type(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._is_over = False
        made: Any = optimizer
        made.__class__ = class_for(type(optimizer))
        made._origins, made._shared, made.parts = (), {}, []
        self._hook = optimizer.register_step_pre_hook(_stepped_by_its_class)
        try:
            made._begin(assigned, evidence)
        except BaseException:
            self.undo()
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, or None after it was garbage collected."""
        return self._optimizer()

    def undo(self) -> None:
        """Restores the optimizer's class and its own step, with its states of now; a second call does nothing."""
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
    """A step pre-hook for callers that took ``optimizer.step`` before the transforms were put on, as schedulers do.

    That function is the class's own step, which would look for states that are on another tier or in 8 bits. The hook
    runs the transformed step in its place, and hands the class's step an optimizer without parameters.
    """
    # A shallow copy, as a planner makes, has the hooks too.
    if not isinstance(optimizer, TransformedOptimizer) or optimizer._is_stepping:
        return None
    loss = TransformedOptimizer.step(optimizer, *args[1:], **kwargs)
    empty = [{**group, "params": []} for group in optimizer.param_groups]
    nothing = made_of(optimizer._own_class, optimizer.__dict__, state={}, param_groups=empty)
    return (nothing, *([] if loss is None else [lambda: loss])), {}


def counts_on_host(group: dict[str, Any]) -> bool:
    """Whether PyTorch keeps the step counts of this parameter group on the CPU, wherever its parameters are."""
    return not (group.get("capturable") or group.get("fused"))


def _on_its_device(key: str, value: Any, parameter: torch.Tensor, group: dict[str, Any], below: set[int]) -> Any:
    """Returns a state on the device where the plain optimizer would have it."""
    if not isinstance(value, torch.Tensor):
        return value
    moves = not counts_on_host(group) if key == "step" else value.dim() > 0
    found = value.to(parameter.device) if moves else value
    return found.clone() if found is value and id(value) in below else found
