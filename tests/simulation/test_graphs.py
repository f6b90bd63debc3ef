"""The autograd graph of a simulated step goes without recursion, however long a chain of nodes it has."""

import functools
import threading

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.profiled import train, x
from tests.support.steps import assert_exact


class Chain(nn.Module):
    def __init__(self, length, width=2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.length = length

    def forward(self, x):
        for _ in range(self.length):
            x = x * self.weight
        return x


def test_a_long_chain_needs_no_stack():
    """On a stack of 512 KiB, where PyTorch's own destructors reach some 2,500 nodes that Python has seen."""
    # On a machine without a card, what PyTorch's CUDA builds before 2.13 make for fake tensors dies with its thread.
    ms.profile(Chain(1), torch.ones(2), loss=lambda y, _: y.sum(), hardware="cpu")
    found = []
    before = threading.stack_size(512 * 1024)
    try:
        run = threading.Thread(
            target=lambda: found.append(
                ms.profile(Chain(3000), torch.ones(2), loss=lambda y, _: y.sum(), hardware="cpu")
            )
        )
        run.start()
    finally:
        threading.stack_size(before)
    run.join()
    assert found[0].peak_bytes > 3000 * 8


class Kept(torch.autograd.Function):
    """What it keeps goes with its node, and not when its backward has run."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept


class Keeps(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100_000))
        self.inner = inner

    def forward(self, x):
        for _ in range(3):
            x = Kept.apply(self.inner(x * self.weight))
        return x


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, functools.partial(torch.optim.AdamW, foreach=False)])
@pytest.mark.parametrize(
    "inner", [nn.Tanh(), ms.transform(nn.Sequential(Chain(2, 100_000), nn.Tanh()), {"": ms.checkpoint()})]
)
def test_what_a_node_keeps_goes_with_the_graph(optimizer, inner):
    """Graphs of recomputes, which end within a backward, too."""
    assert_exact(train(Keeps(inner), x(100_000), functools.partial(optimizer, lr=0.1)))
