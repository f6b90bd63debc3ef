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


def by_gather(nodes, edges):
    return nodes + nodes.gather(0, edges[0, : len(nodes), None].expand(-1, nodes.shape[1]))


def by_index(nodes, edges):
    loops = torch.cat([edges, torch.arange(3).repeat(2, 1)], dim=1)  # an index that is computed from an argument
    return nodes + torch.zeros_like(nodes).index_add(0, loops[1], torch.tanh(nodes)[loops[0]])


@pytest.mark.parametrize("last", [3, 10], ids=["edges among the first rows", "edges among all rows"])
@pytest.mark.parametrize("region", [by_index, by_gather])
def test_a_graph_whose_edges_point_into_the_rows_is_refused_before_it_indexes(region, last):
    """PyTorch's own error was out of bounds, and among the first rows there was none: wrong numbers."""
    nodes, edges = torch.randn(10, 4), torch.randint(0, last, (2, 30))
    region(nodes, edges)
    with pytest.raises(ms.TransformError, match=r"picks rows by an index of shape .* is the same for every piece.*use"):
        ms.tile(chunks=2)(region)(nodes, edges)


def test_an_index_that_is_cut_and_points_beyond_its_piece_is_explained():
    nodes, parent = torch.randn(10, 4), torch.full((10,), 9)
    with pytest.raises(ms.TransformError, match=r"picks row 9 of 10 where a piece has 5 \(index 9 is out"):
        ms.tile(chunks=2)(lambda nodes, parent: nodes + nodes[parent])(nodes, parent)
    with pytest.raises(IndexError, match="index 12"):  # an error of the region itself
        ms.tile(chunks=2)(lambda nodes, parent: nodes + nodes[parent])(nodes, torch.full((10,), 12))


def test_an_index_into_a_table_or_along_another_dimension_is_no_index_of_rows():
    table, order = torch.randn(5, 4), torch.tensor([2, 0, 1, 3, 4])  # as long as a piece

    def region(rows, table, order):
        computed = torch.tanh(table)  # as Swin's biases of relative positions
        return rows[:, order[:4] % 4] + table[order][:1] + computed[order][:1]

    rows = torch.randn(10, 4)
    assert torch.equal(ms.tile(chunks=2)(region)(rows, table, order), region(rows, table, order))
