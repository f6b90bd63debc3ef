"""A usual training step as a function: forward, loss, backward, optimizer, gradients dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.core import Loss, call, scalar_loss
from memscale.optimizers import TransformedOptimizer


@dataclass(frozen=True)
class Loop:
    """What a training loop does around the model.

    Args:
        accumulate: forward and backward passes for each optimizer step.
        keeps_output: whether the model's output lives until the next output takes its place, as
            ``output = model(x)`` has it; otherwise it dies before backward, as in ``loss(model(x)).backward()``.
    """

    accumulate: int = 1
    keeps_output: bool = True

    def __str__(self) -> str:
        if self.keeps_output:
            return "keeps the model's output until the next one takes its place, as output = model(x) does"
        return (
            "lets go of the model's output before backward, as loss(model(x)).backward() does; a loop that names the "
            "output needs keeps_output=True"
        )


def training_step(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss | None,
    accumulate: int,
    *,
    kept: list[Any] | None = None,
    drops: bool = True,
) -> Callable[[], None]:
    """The step: `accumulate` times forward and backward, then the optimizer, then the gradients are dropped.

    The output is let go before backward begins, as in a trainer that asks the model for its loss, or stays in `kept`
    until the next one takes its place, as in a loop that gives it a name. Without `drops` the gradients stay.
    """

    passes = optimizer.backward_passes if isinstance(optimizer, TransformedOptimizer) else 1

    def step() -> None:
        for _ in range(accumulate):
            output = call(model, batch)
            if kept is not None:
                kept[:] = [output]
            found = scalar_loss(output, batch, loss)
            del output
            for left in reversed(range(passes)):
                found.backward(retain_graph=left > 0)
            del found
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if drops:
            model.zero_grad(set_to_none=True)

    return step
