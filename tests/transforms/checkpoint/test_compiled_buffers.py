"""Regions under `torch.compile` that change a buffer in place and read it, wherever that buffer is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(2)
        return (x * self.scale).sin()


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x)).exp()


class Listed(Child):
    def __init__(self) -> None:
        super().__init__()
        self.others = [self.inner]
        del self.inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](self.linear(x)).exp()


class Keyed(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.others = {0: nn.Sequential(*self.others)}


GLOBAL = Scale()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _scaled(self.linear(x)).exp()


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(x)


def gradients(run: Any, module: nn.Module) -> bytes:
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    return bits(torch.autograd.grad(run(x).sum(), [x, *module.parameters()]))


@pytest.mark.filterwarnings("ignore:.*graph break")
@pytest.mark.parametrize(
    "make", [*(pytest.param(make, marks=pytest.mark.deep) for make in (Scale, Child, Listed)), Keyed, Named]
)
def test_gradients_are_those_of_the_module(make: Any) -> None:
    expected = []
    for how in (ms.identity, ms.checkpoint()):
        torch.manual_seed(0)
        GLOBAL.scale.fill_(1)
        torch._dynamo.reset()
        module = make()
        fit = ms.transform(module, {"": how})
        run = module if how == ms.identity else torch.compile(fit, backend="aot_eager")
        expected.append([gradients(run, module) for _ in range(4)])
    assert expected[0] == expected[1]
