"""What a submodule that keeps its own precision changes in place is the caller's, or refused."""

import pytest
import torch
from torch import nn

import memscale as ms


class Scale(nn.Module):
    """Nothing but a vector to learn, so it is kept as a normalisation is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x, state):
        state.mul_(2)
        return x * self.weight * state


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), Scale()

    def forward(self, x, state):
        return self.scale(self.linear(x), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_kept_submodule_that_changes_its_argument_is_refused(dtype):
    state = torch.ones(6)
    with pytest.raises(ms.TransformError, match=r"a Scale, which keeps its own precision .* changed an argument"):
        ms.cast(compute=dtype)(Outer())(torch.randn(4, 6), state)
    assert torch.equal(state, torch.ones(6))
