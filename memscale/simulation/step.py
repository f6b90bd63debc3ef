"""A usual training step as a function: forward, loss, backward, optimizer, gradients dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.core.errors import ConfigError

Loss = Callable[[Any, Any], torch.Tensor]


def call(model: nn.Module, batch: Any) -> Any:
    """``model`` of ``batch``: a tensor is one argument, a tuple or list the arguments, a mapping keywords."""
    if isinstance(batch, torch.Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def training_step(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss | None,
    accumulate: int,
) -> Callable[[], None]:
    """The step: `accumulate` times forward and backward, then the optimizer, then the gradients are dropped.

    The output is let go before backward begins, as in a trainer that asks the model for its loss.
    """

    def step() -> None:
        for _ in range(accumulate):
            scalar_loss(call(model, batch), batch, loss).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)

    return step


def scalar_loss(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """The loss of a step.

    Raises:
        ConfigError: there is none, or it is not a scalar that depends on a parameter.
    """
    if loss is not None:
        value: Any = loss(output, batch)
        source = "loss(output, batch)"
    elif isinstance(output, torch.Tensor):
        value, source = output, "the model's output, which stands for the loss when none is given,"
    else:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        source = "output.loss"
        if value is None:
            raise ConfigError(
                f"the model's output, a {type(output).__name__}, has no loss; pass loss=..., a function "
                "loss(output, batch) that returns a scalar tensor, or put labels into the batch"
            )
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(f"{source} must be a tensor with one element, got {got}; pass loss=... and take its mean")
    if not value.requires_grad:
        raise ConfigError(
            f"{source} does not depend on any parameter that requires a gradient, so there is no backward pass; "
            "call the model with gradients enabled and train at least one parameter"
        )
    return value
