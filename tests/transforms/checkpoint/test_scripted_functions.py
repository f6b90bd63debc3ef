"""Regions that call functions of TorchScript, which optimizes a function at its second call with the same shapes."""

import pytest
import torch

import memscale as ms
from tests.support.checks import bits

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
DOTS = ms.checkpoint(policy=ms.policies.dots_saveable)


def gated(x, w):
    y = torch.tanh(x @ w)
    return y * torch.sigmoid(x)


def by_value(x, w):
    y = torch.sin(x @ w)
    if bool(y.sum() > 0):
        y = torch.exp(y)
    return torch.cos(y)


@pytest.mark.parametrize("how", [ms.checkpoint(), DOTS, ms.compose(ms.checkpoint(), ms.checkpoint())], ids=repr)
@pytest.mark.parametrize("fn", [gated, by_value])
@pytest.mark.parametrize("around", [torch.sin, lambda x: x + 1], ids=["saves more", "saves no more"])
def test_the_recompute_saves_what_the_run_has_saved(fn, how, around):
    """The optimizer's graph saves the same number of tensors of the same shapes, in another order."""
    scripted = torch.jit.script(fn)
    region = how(lambda x, w: around(scripted(x, w)))
    for width in (4, 4, 4, 5, 5, 4):
        x, w = (torch.randn(width, width, requires_grad=True) for _ in range(2))
        expected = torch.autograd.grad(around(fn(x, w)).sum(), (x, w))
        assert bits(torch.autograd.grad(region(x, w).sum(), (x, w))) == bits(expected)
    assert torch._C._get_graph_executor_optimize()
