"""Changes through ``.data`` inside a cast region would go to a copy: they are refused by name, and nothing is lost."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import cast
from tests.support.checks import bits

DOUBLE = cast(compute=torch.float64)


class Momentum(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.online(x) * self.target(x) * self.scale


def assigned(self):
    self.target.weight.data = self.target.weight.data * 0.9 + self.online.weight.data * 0.1


def in_place(self):
    self.target.weight.data.mul_(0.9).add_(self.online.weight.data, alpha=0.1)


def buffer_assigned(self):
    self.scale.data = self.scale.data * 2


def buffer_in_place(self):
    self.scale.data.mul_(2)


def by_foreach(self):
    torch._foreach_mul_([parameter.data for parameter in self.target.parameters()], 0.9)


CHANGES = [assigned, in_place, buffer_assigned, buffer_in_place, by_foreach]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_through_data_is_refused_by_name(change, training):
    model = Momentum(change).train(training)
    before = bits(dict(model.state_dict()))
    fit = ms.transform(model, {"": DOUBLE})
    for _ in range(2):
        with pytest.raises(ms.TransformError, match=r"(target\.(weight|bias)|scale).* through \.data, .* keep="):
            fit(torch.ones(2, 4))
    assert bits(dict(model.state_dict())) == before


def test_an_assignment_in_a_later_call_only():
    calls = []
    fit = ms.transform(Momentum(lambda self: calls and assigned(self)), {"": DOUBLE})
    fit(torch.ones(2, 4))
    calls.append(1)
    with pytest.raises(ms.TransformError, match=r"parameter 'target\.weight' of Momentum"):
        fit(torch.ones(2, 4))


@pytest.mark.parametrize("change", CHANGES)
def test_what_keeps_its_own_precision_is_changed_once(change):
    model, expected = Momentum(change).train(), Momentum(change).train()
    expected.load_state_dict(model.state_dict())
    cast(compute=torch.float32, keep=())(model)(torch.ones(2, 4))  # nothing is copied: it has the dtype
    expected(torch.ones(2, 4))
    assert bits(dict(model.state_dict())) == bits(dict(expected.state_dict()))
