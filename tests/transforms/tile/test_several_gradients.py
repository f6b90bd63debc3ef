"""A backward for several gradients at once, which come as one tensor that stands for all of them."""

import pytest
import torch
from torch import nn

import memscale as ms


@pytest.mark.parametrize(("path", "dtype"), [("0", torch.float32), ("2", torch.float32), ("2", torch.bfloat16)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_backward_for_several_gradients_gives_those_of_one_after_the_other(path, dtype, reduction):
    """Of rows, of a loss head, and of one in 16 bits that goes by its classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 200)).to(dtype)
    x, target = torch.randn(20, 8).to(dtype).requires_grad_(), torch.arange(20)
    fit = ms.transform(model, {path: ms.tile(chunks=4)})
    loss = nn.functional.cross_entropy(fit(x), target, reduction=reduction)
    inputs, directions = [x, model[2].weight], torch.randn(3, *loss.shape).to(loss.dtype)
    several = torch.autograd.grad(loss, inputs, directions, is_grads_batched=True, retain_graph=True)
    one_by_one = zip(*(torch.autograd.grad(loss, inputs, each, retain_graph=True) for each in directions), strict=True)
    for found, expected in zip(several, map(torch.stack, one_by_one), strict=True):
        assert not found.requires_grad
        largest = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=16 * torch.finfo(dtype).eps * largest)
