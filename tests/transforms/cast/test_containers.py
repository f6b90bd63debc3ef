"""What a cast region writes into the lists and dictionaries that it is given stays there, in the caller's types."""

import dataclasses
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import cast, checkpoint, compose

DOUBLE = cast(compute=torch.float64)


class Expert(nn.Module):
    """One of a mixture: appends its balance to a list, its load to a dictionary of lists."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, losses, stats=None):
        hidden = self.linear(x).tanh()
        losses.append(hidden.square().mean())
        if stats is not None:
            stats["load"].append(hidden.abs().sum(0))
            stats["last"] = {"hidden": hidden, "name": "expert"}
        return hidden


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    def forward(self, x):
        losses, stats = [torch.zeros((), dtype=x.dtype)], {"load": []}
        for expert in self.experts:
            x = expert(x, losses, stats)
        assert stats["last"]["name"] == "expert"
        assert len(losses) == 4
        assert len(stats["load"]) == 3
        return x, torch.stack(losses).sum() + torch.stack(stats["load"]).std() + stats["last"]["hidden"].sum()


def gradients(model, x, call=None):
    y, auxiliary = (model if call is None else call)(x)
    assert y.dtype == auxiliary.dtype == torch.float32
    (y.sum() + auxiliary).backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    return found


@pytest.mark.parametrize("how", [DOUBLE, compose(checkpoint(), DOUBLE), compose(DOUBLE, checkpoint())], ids=repr)
def test_auxiliary_losses_and_their_gradients_arrive(how):
    model, x = Mixture(), torch.randn(6, 4, requires_grad=True)
    expected = gradients(model, x)
    fit = ms.transform(model, {"experts.*": how})
    for _ in range(2):
        for grad, other in zip(gradients(fit, x), expected, strict=True):
            torch.testing.assert_close(grad, other)


def test_a_holder_is_the_callers_own_and_holds_what_it_held():
    tensor, other, number = torch.ones(2), torch.zeros(3), 5
    inner = {"t": tensor}
    held = [tensor, other, inner, number, None]
    seen = []

    def region(x, held):
        seen.extend([held, held[0].dtype, held[2]["t"].dtype, held[0] is held[2]["t"]])
        held.reverse()
        del held[0]
        held.append(x)
        held.append({"made": [x * 2]})
        return x

    x = torch.ones(2, 4)
    DOUBLE(region)(x, held)
    assert seen == [held, torch.float64, torch.float64, True]
    assert seen[0] is held
    assert held[0] == number
    assert held[1] is inner
    assert inner["t"] is tensor
    assert held[2] is other
    assert held[3] is tensor
    assert held[4] is x
    assert held[5]["made"][0].dtype == torch.float32


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda: defaultdict(list)])
def test_dictionaries_of_each_kind(kind):
    held = kind()
    held["t"] = torch.ones(2)
    before = held["t"]

    def region(x, held):
        assert held["t"].dtype == torch.float64
        held["u"] = held["t"] * 2
        return x

    DOUBLE(region)(torch.ones(2, 4), held)
    assert held["t"] is before
    assert held["u"].dtype == torch.float32
    assert held["u"].tolist() == [2, 2]


def test_one_list_given_twice_is_one_list():
    held = []
    DOUBLE(lambda x, a, b: [a.append(x * 2), b.append(x * 3), x][2])(torch.ones(2), held, held)
    assert [tensor[0].item() for tensor in held] == [2, 3]


def test_after_an_exception_holders_hold_their_own():
    tensor = torch.ones(2)
    held, nested = [tensor], {"inner": [tensor]}

    def region(x, held, nested):
        nested["inner"].append(x * 2)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        DOUBLE(region)(torch.ones(2), held, nested)
    assert held[0] is tensor
    assert nested["inner"][0] is tensor
    assert nested["inner"][1].dtype == torch.float32


def test_a_captured_parameter_put_into_a_list_is_the_parameter():
    layer, held = nn.Linear(4, 4), []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, held):
            held.append(self.layer.weight)
            return self.layer(x)

    DOUBLE(Keeps())(torch.ones(2, 4), held)
    assert held[0] is layer.weight


@dataclasses.dataclass
class Carrier:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


def test_a_write_into_an_object_that_is_copied_is_refused_by_name():
    def region(x, carrier):
        carrier.extra = carrier.hidden * 2
        return x

    carrier = Carrier(torch.ones(2))
    with pytest.raises(ms.TransformError, match=r"writes into an argument, a Carrier, of which it was given a copy"):
        DOUBLE(region)(torch.ones(2), carrier)
    read = DOUBLE(lambda x, carrier: x * carrier.hidden)
    assert read(torch.ones(2), carrier).dtype == torch.float32
