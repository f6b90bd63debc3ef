"""Places where a region's dependencies are stored: read, compared and put back."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.regions.scope import Scope, holds, put_back


def exchange(module):
    del module.mask
    module.other = 1


@pytest.mark.parametrize(
    "change",
    [
        exchange,
        lambda module: module.table.update({"b": module.table.pop("a")}),
        lambda module: module.table.update({"a": module.table.pop("a")}),
        lambda module: module.table.update(a=3),
        lambda module: module.items.append(1),
    ],
    ids=["another attribute for None", "another key", "another order", "another value", "another item"],
)
def test_a_change_that_leaves_as_many_entries_is_seen_and_put_back(change):
    module = nn.Linear(2, 2)
    module.mask, module.table, module.items = None, {"a": 1, "b": 2}, [0]
    scope = Scope(module)
    attributes = list(module.__dict__)
    assert all(map(holds, scope.places, scope.contents))
    change(module)
    assert not all(map(holds, scope.places, scope.contents))
    put_back(scope)
    assert all(map(holds, scope.places, scope.contents))
    assert sorted(module.__dict__) == sorted(attributes)
    assert list(module.table.items()) == [("a", 1), ("b", 2)]


def test_an_attribute_that_took_the_place_of_none_is_not_there_in_the_recompute():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None

        def forward(self, x):
            return x.sin() * (2 if hasattr(self, "mask") else 3)

    def step(how):
        module, x = Masked(), torch.ones(2, requires_grad=True)
        y = how(module)(x).sum()
        exchange(module)
        y.backward()
        return x.grad

    assert torch.equal(step(ms.checkpoint()), step(ms.identity))
