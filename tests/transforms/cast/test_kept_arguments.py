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


class Noting(nn.Module):
    """Nothing but a vector to learn; it writes what it saw into what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x, notes, cache):
        notes.append(x.square().sum())
        cache["first"] = cache.setdefault("seen", [x])[0] * 2
        return x * self.weight


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.noting = nn.Linear(6, 6), Noting()

    def forward(self, x):
        notes, cache = [x], {}
        y = self.linear(self.noting(x, notes, cache))
        return y, notes, cache


@pytest.mark.parametrize("keep", [("<norms>",), ("noting",)], ids=["by structure", "by name"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_kept_submodule_writes_into_the_lists_and_dictionaries_of_its_caller(dtype, keep):
    torch.manual_seed(0)
    model, x = Collecting(), torch.randn(4, 6)
    _, plain_notes, plain_cache = model(x)
    _, notes, cache = ms.cast(compute=dtype, keep=keep)(model)(x)
    assert len(notes) == len(plain_notes) == 2
    assert cache.keys() == plain_cache.keys()
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close([*notes, cache["first"]], [*plain_notes, plain_cache["first"]], **near)
