"""Optimizers of every sort, models for them, and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.checks import bits


class Lion(torch.optim.Optimizer):
    """As such classes are written: it changes `.data`, which autograd does not see."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                one, two = group["betas"]
                p.data.add_((average * one + p.grad * (1 - one)).sign_(), alpha=-group["lr"])
                average.mul_(two).add_(p.grad, alpha=1 - two)


class CountsInTheGroup(torch.optim.SGD):
    """Its count of steps is an option of the group, as that of a schedule-free optimizer."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            count = group.get("count", 0)
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] / (count + 1))
            group["count"] = count + 1


def _matrices(parameters: Any) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.dim() == 2]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "Adam, fused, amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, fused=True, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Muon": lambda p: torch.optim.Muon(_matrices(p), lr=0.05),
    "Lion": Lion,
    "a count in the group": lambda p: CountsInTheGroup(p, lr=0.05),
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number).to(next(model.parameters()).dtype)).float().square().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> None:
    for number in steps:
        loss_of(model, number).backward()
        optimizer.step()
        model.zero_grad()


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some plain steps."""
    model = network()
    optimizer = make(model.parameters())
    train(model, optimizer, range(steps))
    return model, optimizer


def twins(make: Callable[[Any], torch.optim.Optimizer], how: Any, steps: int = 2) -> list[Any]:
    """A model and its optimizer after some plain steps, and the same again, its optimizer under `how`."""
    model, optimizer = trained(make, steps)
    other, plain = copy.deepcopy((model, optimizer))
    return [(model, optimizer), (other, how(plain))]


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything that training has changed."""
    return bits(dict(model.state_dict())), bits(optimizer.state_dict())
