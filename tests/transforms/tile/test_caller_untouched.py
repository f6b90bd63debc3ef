"""A look at what a region does leaves the caller's objects alone, and a change that pieces would repeat is refused."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import tile
from memscale.transforms.tile.head import linear
from tests.transforms.test_hidden_changes import CHANGES, Changing, objects


class Note:
    def __init__(self):
        self.calls = 0
        self.kept = []


class Assigns(Changing):
    def __init__(self, change):
        super().__init__(change)
        self.note = Note()


@pytest.mark.parametrize(
    "change",
    [
        *CHANGES,
        lambda self: self.linear.weight.data.numpy().fill(7),
        lambda self: setattr(self.linear.weight, "grad", self.linear.weight.data * 2),
        lambda self: self.linear.requires_grad_(False),
        lambda self: setattr(self, "scale", self.scale * 2),
        lambda self: setattr(self.note, "calls", self.note.calls + 1),
        lambda self: self.note.kept.append(self.linear.weight * 1),
        lambda self: self.linear.double().float(),
    ],
)
def test_the_question_whether_it_is_a_projection_touches_nothing(change):
    model = Assigns(change)
    before = objects(model), model.linear.weight.grad, model.linear.weight.requires_grad, dict(model.note.__dict__)
    linear.is_projection(model.forward, torch.ones(6, 4))
    after = objects(model), model.linear.weight.grad, model.linear.weight.requires_grad, dict(model.note.__dict__)
    assert after == before
    assert model.note.kept == []


class Caching(nn.Module):
    """A projection whose weight is made of another, once a step."""

    def __init__(self):
        super().__init__()
        self.weight, self.made, self.calls = nn.Parameter(torch.randn(4, 4)), None, 0

    def forward(self, x):
        if self.made is None:
            self.made = self.weight.tanh()
        self.calls += 1
        return x @ self.made


@pytest.mark.parametrize("made", [None, torch.ones(4, 4)], ids=["stores a tensor", "counts"])
def test_a_projection_that_stores_something_is_cut_as_any_region(made):
    """Logits that are made later run it for their shape first, without gradients, and left what that had stored."""
    model = Caching()
    model.made = made
    fit = ms.transform(nn.Sequential(model, nn.ReLU()), {"0": tile(chunks=2)})
    if made is None:
        with pytest.raises(ms.TransformError, match="stores a tensor of shape"):
            fit(torch.ones(6, 4))
        assert fit[0].made.requires_grad
    else:
        fit(torch.ones(6, 4, requires_grad=True)).sum().backward()
        assert fit[0].calls == 1


def test_under_torch_func_a_counter_counts_once_and_a_stored_tensor_is_refused():
    model = Assigns(lambda self: setattr(self.note, "calls", self.note.calls))
    model.count = 0
    model.change = lambda self: setattr(self, "count", self.count + 1)
    x = torch.randn(6, 4)
    torch.func.vjp(tile(chunks=3)(model), x)
    assert model.count == 1
    model.change = lambda self: setattr(self, "scale", self.scale * 2)
    with pytest.raises(ms.TransformError, match=r"stores a tensor of shape \[4\] under 'scale'"):
        torch.func.vjp(tile(chunks=3)(model), x)


VIEWS = {
    "the argument itself": lambda x: x,
    "slice": lambda x: x[:, 1:3],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "chunk": lambda x: x.chunk(2, -1)[1],
}
ROWS = {
    "row": lambda x: x[0],
    "rows": lambda x: x[1:],
    "of the transpose": lambda x: x.t()[:, :1],
    "of the view": lambda x: x.view(-1)[2:7],
    "chunk": lambda x: x.chunk(2)[0],
}
TILES = [tile(chunks=2), tile(chunks=2, recompute=False)]


def changing(view):
    def fn(x):
        view(x).mul_(0.5)
        return x.sin()

    return fn


@pytest.mark.parametrize("how", TILES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_change_of_all_rows_of_an_argument_by_a_view_reaches_the_caller(view, how):
    x, expected = torch.ones(6, 4), torch.ones(6, 4)
    view(expected).mul_(0.5)
    assert torch.equal(how(changing(view))(x), expected.sin())
    assert torch.equal(x, expected)


@pytest.mark.parametrize("how", TILES)
@pytest.mark.parametrize("view", ROWS.values(), ids=ROWS)
def test_a_change_of_some_rows_which_each_piece_would_take_for_its_own_is_refused(view, how):
    x = torch.ones(6, 4)
    with pytest.raises(ms.TransformError, match="some rows of an argument of shape"):
        how(changing(view))(x)
    assert torch.equal(x, torch.ones(6, 4))


@pytest.mark.parametrize("how", TILES)
@pytest.mark.parametrize("in_no_grad", [False, True])
@pytest.mark.parametrize("view", (VIEWS | ROWS).values(), ids=VIEWS | ROWS)
def test_no_view_of_an_argument_that_needs_a_gradient_may_be_changed(view, how, in_no_grad):
    def fn(x):
        with torch.set_grad_enabled(not in_no_grad):
            view(x).mul_(0.5)
        return x.sin()

    x = torch.ones(6, 4, requires_grad=True) * 1
    # What autograd says of `chunk` it says without `tile`, too.
    refused = pytest.raises((ms.TransformError, RuntimeError), match=r"tile\(.*in place|Output \d of Split")
    with refused as caught:
        how(fn)(x)
    assert isinstance(caught.value, ms.TransformError) or (view(x).grad_fn.name() == "SplitBackward0")
