"""One memory that a region knows by several names, and changes in place: one tensor is right, views are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits


class View(nn.Module):
    """A view of a buffer, kept as an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))
        self.row = self.table[0]

    def forward(self, x):
        self.table.mul_(1.5)
        return torch.sin(x * self.row)


class Shared(nn.Module):
    """A buffer that is also in a list: one tensor by two names."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))
        self.tables = [self.table]

    def forward(self, x):
        self.tables[0].mul_(1.5)
        return torch.sin(x * self.table[0].clone())


class WriteView(View):
    def forward(self, x):
        self.row.mul_(1.5)
        return torch.sin(x * self.table[0])


class ViewWithGradient(View):
    """What is written has a graph, which shows in the view."""

    def forward(self, x):
        self.table = self.table.detach()
        self.row = self.table[0]
        self.table.mul_(x)
        return torch.sin(x * self.row)


class Columns(View):
    """Views that lie between each other's numbers, and one that shares none with the others."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = self.table[:, :2], self.table[:, 1:], self.table[1]

    def forward(self, x):
        self.left.add_(0.25)
        self.last.mul_(2)
        return torch.sin(x * self.right[0].sum() * self.table.sum(0))


class Child(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.row = row

    def forward(self, x):
        self.row.mul_(1.25)
        return x * self.row.clone()  # what autograd saves must not change


class Children(nn.Module):
    """Children that hold views of their parent's buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))
        self.children_of = nn.ModuleList([Child(self.table[0]), Child(self.table[1])])

    def forward(self, x):
        for child in self.children_of:
            x = torch.sin(child(x) + self.table.sum())
        return x


class Argument(nn.Module):
    """A buffer that is also given as an argument."""

    def __init__(self, part=slice(None)):
        super().__init__()
        self.register_buffer("state", torch.ones(3))
        self.part = part

    def region(self, x, given):
        given.mul_(1.5)
        return torch.sin(x * self.state) + given.sum()

    def forward(self, x):
        return self.inner(x, self.state[self.part])


class Weight(nn.Module):
    """A row of a weight, cut off from it, that is changed in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.row = self.linear.weight.detach()[0]

    def forward(self, x):
        self.row.mul_(0.5)
        return torch.tanh(self.linear(x))


def checkpointed(module):
    if isinstance(module, Argument):
        module.inner = ms.checkpoint()(module.region)
        return module
    return ms.checkpoint()(module)


REFUSED = {
    "view": View,
    "write through the view": WriteView,
    "with a gradient": ViewWithGradient,
    "columns": Columns,
    "children": Children,
    "argument": Argument,
    "view as an argument": lambda: Argument(slice(1, None)),
    "row of a weight": Weight,
}
BY_NAME = "the region changed (buffer|attribute|parameter|its tensor argument) .* also reaches by a view of the same"


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_region_that_changes_memory_that_it_also_reaches_by_a_view_is_refused(case):
    with pytest.raises(ms.CorrectnessError, match=BY_NAME):
        checkpointed(REFUSED[case]())(torch.ones(3, requires_grad=True) * 1.0)


@pytest.mark.parametrize("case", ["view", "write through the view"])
def test_it_is_refused_by_the_same_name_where_the_region_differentiates_inside(case):
    """Its recompute comes during the run, before the run's end tells what changed."""
    inner = checkpointed(REFUSED[case]())

    def region(x):
        y = torch.sin(inner.fn(x) * x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    with pytest.raises(ms.CorrectnessError, match=BY_NAME):
        ms.checkpoint()(region)(torch.ones(3, requires_grad=True) * 1.0)


def test_statistics_in_one_memory_that_a_kernel_writes_without_a_new_version_are_refused():
    norm = nn.BatchNorm1d(3)
    both = torch.zeros(2, 3)
    norm.running_mean, norm.running_var = both[0], both[1]
    norm.all = both
    with pytest.raises(ms.CorrectnessError, match=BY_NAME):
        ms.checkpoint()(norm)(torch.randn(4, 3, requires_grad=True))


def test_two_forwards_before_their_backwards():
    def run(how):
        fn = how(Shared())
        xs = [torch.full((3,), float(i + 1), requires_grad=True) for i in range(3)]
        for y in reversed([fn(x) for x in xs]):
            y.sum().backward()
        return bits([x.grad for x in xs])

    assert run(ms.checkpoint()) == run(lambda module: module)


def test_the_same_tensor_twice_among_the_arguments():
    def region(x, a, b):
        a.mul_(2)
        return torch.sin(x * b)

    def run(fn):
        x, state = torch.ones(3, requires_grad=True), torch.ones(3)
        for _ in range(2):
            fn(x, state, state).sum().backward()
        return bits([x.grad, state])

    assert run(ms.checkpoint()(region)) == run(region)


def test_an_activation_and_its_row_among_the_arguments():
    def region(h, row):
        h.mul_(2)
        return torch.sin(h * row)

    h = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_() * 1.0
    with pytest.raises(ms.CorrectnessError, match=BY_NAME):
        ms.checkpoint()(region)(h, h[0])


def test_a_view_of_another_type_is_refused_by_name():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("z", torch.ones(2, dtype=torch.complex64))
            self.parts = torch.view_as_real(self.z)

        def forward(self, x):
            self.parts.mul_(2)
            return x * self.z.real

    with pytest.raises(ms.CorrectnessError, match=r"buffer 'z' of Complex|attribute 'parts' of Complex"):
        ms.checkpoint()(Complex())(torch.ones(2, requires_grad=True))


def test_rows_that_do_not_overlap_are_copied_alone():
    """A region that changes one row of a large table holds that row until backward, not the table."""
    table = torch.zeros(1000, 1000)
    row = table[3]

    def region(x):
        row.add_(1.0)
        return torch.sin(x * row)

    held = [residual.nbytes for residual in ms.saved_residuals(ms.checkpoint()(region), torch.ones(1000))]
    assert sum(held) < 20_000
