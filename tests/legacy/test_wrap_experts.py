"""`wrap` of composite mixtures of experts: the gradients of the model, and of `transform` with the same plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from tests.support.checks import bits
from tests.support.coverings import in_turn

WIDTH, EXPERTS = 16, 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))


class Mixture(nn.Module):
    def __init__(self, how: str, *, shared: bool) -> None:
        super().__init__()
        self.how, self.norm, self.router = how, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.shared = nn.ModuleList(mlp() for _ in range(EXPERTS)), mlp() if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, which = (chosen == number).nonzero(as_tuple=True)
            result = expert(rows[at]) * weights[at, which, None]
            if self.how == "in place":
                total.index_add_(0, at, result)
            elif self.how == "scattered":
                total = total.scatter_add(0, at[:, None].expand(-1, WIDTH), result)
            else:
                total = total.index_add(0, at, result)
        if self.shared is not None:
            total = total + self.shared(rows)
        return x + total.view_as(x)


class Composite(nn.Module):
    """A tower beside a language model of attention and experts."""

    def __init__(self, how: str, *, shared: bool) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Mixture(how, shared=shared) for _ in range(3))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.tower(picture)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def gradients(model: Any) -> list[bytes]:
    tokens, found = torch.arange(64).view(2, 32) % 50, []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(tokens, torch.ones(2, 32, WIDTH)).backward()
        found.append(bits([parameter.grad for parameter in model.parameters()]))
    return found


@pytest.mark.parametrize(("how", "shared"), in_turn(["added", "in place", "scattered"], [False, True]))
def test_wrap_gives_the_gradients_of_the_model_and_of_transform(how: str, shared: bool) -> None:
    torch.manual_seed(0)
    plain = Composite(how, shared=shared)
    wrapped = ms.wrap(copy.deepcopy(plain), ms.Config(force_optimize=True, enable_logging=False))
    found = gradients(wrapped)
    plan = wrapped._memscale_executor.plan
    assert len(plan) > 0
    assert found == gradients(ms.transform(copy.deepcopy(plain), plan)) == gradients(plain)
