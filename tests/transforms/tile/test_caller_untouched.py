"""A look at what a region does leaves the caller's objects alone, and a change that pieces would repeat is refused."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import tile
from memscale.transforms.tile.head import linear
from memscale.transforms.tile.head.deferred import Deferred
from tests.support.checks import bits


class Assigns(nn.Module):
    """A projection but for what `change` does first."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.note = Note()
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.linear(x) * self.scale


class Note:
    def __init__(self):
        self.calls = 0
        self.kept = []


def assigned(self):
    self.linear.weight.data = torch.renorm(self.linear.weight.data, 2, 0, 0.5)


def assigned_buffer(self):
    self.scale.data = self.scale.data * 0.5


def doubled(self):
    self.linear.weight.data.mul_(2)


def doubled_buffer(self):
    self.scale.data.mul_(2)


def momentum(self):
    with torch.no_grad():
        for parameter in self.linear.parameters():
            parameter.data = parameter.data * 0.9


def by_foreach(self):
    torch._foreach_mul_([p.data for p in self.linear.parameters()], 0.5)


def by_out(self):
    torch.mul(self.scale.data, 2, out=self.scale)


CHANGES = [assigned, assigned_buffer, doubled, doubled_buffer, momentum, by_foreach, by_out]


def objects(model):
    return [(name, id(value), value.device, value.data_ptr(), bits(value)) for name, value in state(model)]


def state(model):
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("how", [tile(chunks=2), tile(chunks=2, recompute=False)], ids=["recomputing", "kept"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("training", [True, False])
def test_a_change_of_data_is_refused_by_name_before_anything_is_lost(change, how, training):
    model = Assigns(change).train(training)
    before = objects(model)
    fit = ms.transform(model, {"": how})
    for _ in range(2):
        with pytest.raises(ms.TransformError, match=r"would update '\w+' once|changes .* through \.data"):
            fit(torch.ones(6, 4))
    assert objects(model) == objects(fit) == before


def test_an_assignment_in_a_later_call_only_is_refused_too():
    """Where pieces recompute, the checkpoint of the first piece refuses it (`CorrectnessError`)."""
    model, calls = Assigns(lambda self: None), []
    fit = ms.transform(nn.Sequential(model, nn.ReLU()), {"": tile(chunks=3, recompute=False)})
    fit[0].change = lambda self: calls and assigned(self)
    fit(torch.ones(6, 4))
    before = objects(model)
    calls.append(1)
    with pytest.raises(ms.TransformError, match=r"changes parameter '\S*weight' of \w+ through \.data"):
        fit(torch.ones(6, 4))
    assert objects(model) == before


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


def test_a_projection_that_touches_nothing_is_still_one():
    model = Assigns(lambda self: None)
    assert type(tile(chunks=2)(model)(torch.ones(6, 4))) is Deferred


def test_a_hook_below_sees_no_value_that_is_not_there():
    model, seen = Assigns(lambda self: None), []
    model.linear.register_forward_hook(lambda module, args, out: seen.append(type(out)))
    x = torch.randn(6, 4)
    out = tile(chunks=2)(model)(x)
    torch.testing.assert_close(out, model(x))
    assert seen == [torch.Tensor] * 2, "once for the tiled call, and once for the model as it is"


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


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(0.5).sin()


def test_an_argument_that_is_changed_in_place_without_a_gradient_is_changed_for_the_caller():
    x = torch.randn(4, 6)
    changed = x * 0.5
    assert torch.equal(ms.tile(chunks=2)(InPlace())(x), changed.sin())
    assert torch.equal(x, changed)
