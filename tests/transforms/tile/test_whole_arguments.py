"""An argument that every piece gets whole is changed once a piece: refused before it changes."""

import pytest
import torch
from torch import nn

import memscale as ms


def in_place(rows, table):
    table.mul_(2)
    return torch.sin(rows * table)


def by_foreach(rows, table):
    torch._foreach_mul_([table], 2.0)
    return torch.sin(rows * table)


def through_a_view(rows, table):
    table[:1].mul_(2)
    return torch.sin(rows * table)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("region", [in_place, by_foreach, through_a_view])
def test_an_argument_passed_whole_is_not_changed_once_for_every_piece(region, recompute):
    table = torch.ones(6)
    with pytest.raises(ms.TransformError, match=r"would update an argument of shape \[6\] that is passed whole"):
        ms.tile(chunks=2, recompute=recompute)(region)(torch.ones(4, 6), table)
    assert torch.equal(table, torch.ones(6))


def test_an_argument_passed_whole_may_be_read_and_copied():
    def region(rows, table):
        return torch.sin(rows * table.clone().mul_(2))

    rows, table = torch.randn(4, 6), torch.randn(6)
    assert torch.equal(ms.tile(chunks=2)(region)(rows, table), region(rows, table))


def test_the_first_of_keyword_arguments_is_the_one_that_is_passed_first():
    """It was the first by the alphabet."""
    rows, bias = torch.randn(4, 6), torch.randn(6)
    found = ms.tile(chunks=2)(lambda rows, bias: torch.sin(rows + bias))(rows=rows, bias=bias)
    assert torch.equal(found, torch.sin(rows + bias))


def test_a_module_that_the_first_piece_makes_is_refused_once():
    """Every piece would make its own, and train that."""

    class Lazy(nn.Sequential):
        def forward(self, x):
            if len(self) == 1:
                self.append(nn.Linear(2, 2))
            return super().forward(x)

    model = Lazy(nn.Linear(2, 2))
    region = ms.tile(chunks=2)(model)
    with pytest.raises(ms.TransformError, match=r"makes a module, '1'.*call the region again"):
        region(torch.ones(4, 2))
    made = model[1]
    region(torch.ones(4, 2)).sum().backward()
    assert model[1] is made
    assert made.weight.grad is not None
