"""A tiled region that counts in Python, inside a region that is recomputed: each piece counts from the same start."""

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(x * self.calls)


@pytest.mark.parametrize("inner", [ms.tile(chunks=2), ms.tile(chunks=2, recompute=False)])
@pytest.mark.parametrize("outer", [ms.identity, ms.checkpoint(), ms.tile(chunks=2)])
def test_the_pieces_of_a_recompute_count_from_the_same_start(outer, inner):
    def run(how):
        module, x = Counting(), torch.linspace(-1, 1, 8).reshape(8, 1).requires_grad_()
        region = how(module)
        (region(x) + region(x)).sum().backward()
        return x.grad, module.calls

    assert bits(run(ms.compose(outer, inner))) == bits(run(ms.identity))
