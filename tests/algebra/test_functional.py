"""`functional`: the module itself is as it was after a call, also where it is reached by two paths."""

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits


class TwoPaths(nn.Module):
    """Its norm and its embedding have two names each, and the head has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(4, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.again = nn.ModuleList([self.embed, self.norm])

    def forward(self, ids):
        return self.head(self.again[1](self.embed(ids)) + self.again[0](ids)).square().sum()


def held(model):
    return {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("how", ["call", "grad", "compiled"])
def test_a_module_with_two_paths_holds_afterwards_what_it_held(how):
    """PyTorch's own functional_call leaves the values of the call in it, and so unties its weights."""
    model, ids = TwoPaths(), torch.tensor([0, 1, 3])
    before, values = held(model), bits(model.state_dict())
    model.train(how != "grad")  # where PyTorch refuses to count batches
    fn, state = ms.functional(model)
    other = {name: 2 * tensor.detach() for name, tensor in state.items()}
    if how == "grad":
        learned = {name: other[name] for name, _ in model.named_parameters()}
        grads = torch.func.grad(lambda learned: fn({**other, **learned}, ids))(learned)
        assert grads["embed.weight"].count_nonzero() > 0
    else:
        call = torch.compile(fn, backend="eager", fullgraph=True) if how == "compiled" else fn
        call(other, ids)
        assert int(other["norm.num_batches_tracked"]) == 1  # a buffer that is changed in place is that of the state
    assert held(model) == before
    assert bits(model.state_dict()) == values
