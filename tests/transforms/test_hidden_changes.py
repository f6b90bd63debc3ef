"""Changes through ``.data`` that a transform would lose or repeat are refused by name, before anything is lost."""

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits
from tests.support.layers import PARAMS, runtime_of

DOUBLE, KEPT = ms.cast(compute=torch.float64), ms.tile(chunks=2, recompute=False)
HOWS = {"cast": DOUBLE, "tile": ms.tile(chunks=2), "tile, kept": KEPT, "streamed": PARAMS}


class Changing(nn.Module):
    """A projection but for what `change` does first."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change
        self.register_buffer("scale", torch.full((4,), 3.0))

    def forward(self, x):
        self.change(self)
        return self.linear(x) * self.scale


def assigned(self):
    self.linear.weight.data = torch.renorm(self.linear.weight.data, 2, 0, 0.5)


def in_place(self):
    self.linear.weight.data.mul_(2)


def by_foreach(self):
    torch._foreach_mul_([parameter.data for parameter in self.linear.parameters()], 0.5)


def assigned_buffer(self):
    self.scale.data = self.scale.data * 0.5


def buffer_in_place(self):
    self.scale.data.mul_(2)


def by_out(self):
    torch.mul(self.scale.data, 2, out=self.scale)


OF_PARAMETERS, OF_BUFFERS = [assigned, in_place, by_foreach], [assigned_buffer, buffer_in_place, by_out]
CHANGES = [*OF_PARAMETERS, *OF_BUFFERS]


def objects(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(value), value.device, value.data_ptr(), bits(value)) for name, value in tensors]


def fitted(model, how):
    return ms.transform(nn.Sequential(model, nn.ReLU()), {"": how}, runtime=runtime_of(0))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("change", "how"),
    [(change, how) for how in HOWS for change in (OF_PARAMETERS if how == "streamed" else CHANGES)],
)
def test_a_change_is_refused_by_name_before_anything_is_lost(change, how, training):
    model = Changing(change).train(training)
    before, fit = objects(model), fitted(model, HOWS[how])
    for _ in range(2):
        with pytest.raises(
            ms.TransformError, match=r"(weight|bias|scale).* through \.data|would update '[\w.]+' once|scale'"
        ):
            fit(torch.ones(6, 4))
    if how == "streamed":  # the parameters live on another tier by now
        assert [each[::4] for each in objects(model)] == [each[::4] for each in before]
    else:
        assert objects(model) == objects(fit[0]) == before


@pytest.mark.parametrize("how", [DOUBLE, KEPT, PARAMS], ids=["cast", "tile, kept", "streamed"])
@pytest.mark.parametrize("begins", ["later", "in training"])
def test_a_change_that_begins_later_is_refused_too(how, begins):
    """Where pieces recompute, the checkpoint of the first piece refuses it (`CorrectnessError`)."""
    calls = []
    model = Changing(lambda self: assigned(self) if (calls if begins == "later" else self.training) else None)
    fit = fitted(model, how).train(begins == "later")
    fit(torch.ones(6, 4))
    before = bits(model.state_dict())
    calls.append(1)
    with pytest.raises(ms.TransformError, match=r"parameter '\S*weight' of \w+.* through \.data"):
        fit.train()(torch.ones(6, 4))
    assert bits(model.state_dict()) == before


def without_grad(self):
    with torch.no_grad():
        self.linear.weight.renorm_(p=2, dim=0, maxnorm=0.1)


@pytest.mark.parametrize(
    ("change", "how"),
    [*[(change, ms.cast(compute=torch.float32, keep=())) for change in CHANGES], (without_grad, PARAMS)],
)
def test_a_change_of_what_is_not_copied_happens_once(change, how):
    """Of what has the dtype of a cast already; and of streamed parameters as the error advises."""
    model, expected = Changing(change), Changing(change)
    expected.load_state_dict(model.state_dict())
    for each in (fitted(model, how), nn.Sequential(expected, nn.ReLU())):
        for _ in range(2):
            each(torch.ones(2, 4)).sum().backward()
    assert bits(model.state_dict()) == bits(expected.state_dict())
    assert bits(model.linear.weight.grad) == bits(expected.linear.weight.grad)
