"""Regions under `torch.compile` that change a tensor in place, wherever that tensor is and however they change it."""

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


class Changed(nn.Module):
    """Changes a tensor, which `hold` makes of ones, by `change`, which the code of the module does not name."""

    def __init__(self, change: Any, hold: Any = torch.Tensor.clone) -> None:
        super().__init__()
        self.change, self.scale = change, hold(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change(self.scale)
        return (x * self.scale).sin()


class Statistics(nn.Module):
    """Reads the statistics of a norm, which are constants only for the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(self.norm(x)) * self.norm.running_var).sin()


MORE = {
    "a parameter": lambda: Changed(lambda scale: scale.mul_(2), nn.Parameter),
    "a view": lambda: Changed(lambda scale: scale[1:].mul_(2)),
    "data": lambda: Changed(lambda scale: scale.data.mul_(2)),
    "a list": lambda: Changed(lambda scale: torch._foreach_mul_([scale], 2)),
    "out": lambda: Changed(lambda scale: torch.mul(scale, 2, out=scale)),
    "statistics": Statistics,
}


def gradients(run: Any, module: nn.Module) -> bytes:
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    return bits(torch.autograd.grad(run(x).sum(), [x, *module.parameters()]))


@pytest.mark.filterwarnings("ignore:.*graph break")
@pytest.mark.parametrize(
    "make",
    [*(pytest.param(make, marks=pytest.mark.deep) for make in (Scale, Child, Listed)), Keyed, Named, *MORE.values()],
    ids=["Scale", "Child", "Listed", "Keyed", "Named", *MORE],
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


class Average(Child):
    """Changes a buffer that it does not read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.scale.mul_(0.5).add_(x.detach().mean(0))
        return self.norms(self.linear(x)).exp()

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())


@pytest.mark.filterwarnings("ignore:.*graph break")
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_what_a_region_writes_and_does_not_read_is_in_the_graph(backend: str) -> None:
    """Without a call before. The backend "eager" would draw other random numbers in backward, and says so."""
    found = []
    for how in (ms.identity, ms.checkpoint()):
        torch.manual_seed(0)
        torch._dynamo.reset()
        module = Average()
        fit = ms.transform(module, {"": how, "norms": how})
        run = module if how == ms.identity else torch.compile(fit, backend=backend, fullgraph=backend != "eager")
        found.append((gradients(run, module), bits(list(module.buffers()))))
    assert found[0] == found[1]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="use backend='aot_eager'"):
        torch.compile(fit, backend="eager", fullgraph=True)(torch.ones(2, 4))
