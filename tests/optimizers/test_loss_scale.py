"""LossScale: the numbers of torch.amp.GradScaler, as a value."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core.errors import ConfigError, CorrectnessError
from memscale.optimizers import LossScale


def train(model, step, overflow_at=()):
    """Six steps; returns the parameters after each."""
    generator = torch.Generator().manual_seed(1)
    seen = []
    for turn in range(6):
        x = torch.randn(4, 3, generator=generator)
        if turn in overflow_at:
            x[0, 0] = math.inf
        step(lambda x=x: model(x).square().mean())
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


@pytest.mark.parametrize("overflow_at", [(), (0,), (1, 2), (4,)])
def test_it_steps_as_a_grad_scaler_does(overflow_at):
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = [LossScale(factor=1024.0, interval_steps=2)]

    def our_step(loss):
        ours.zero_grad()
        scales[-1].scale(loss()).backward()
        scales.append(scales[-1].step(ours))
        factors.append(scales[-1].factor)

    def their_step(loss):
        theirs.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(theirs)
        scaler.update()
        expected.append(scaler.get_scale())

    factors, expected = [], []
    one, two = train(model, our_step, overflow_at), train(other, their_step, overflow_at)
    assert factors == expected
    assert all(torch.equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
    assert scales[0] == LossScale(factor=1024.0, interval_steps=2)


def test_float16_gradients_that_would_vanish_arrive():
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    fit = ms.transform(model, {"": ms.cast(compute=torch.float16)})

    def gradient(scale):
        model.zero_grad()
        scale.scale((fit(x) * 1e-8).sum()).backward()
        scale.unscale_(torch.optim.SGD(model.parameters()))
        return model.weight.grad

    assert not gradient(LossScale(factor=1.0)).any()
    assert torch.allclose(gradient(LossScale(factor=2.0**16)), torch.full((1, 4), 2e-8), rtol=1e-2)


def test_gradients_of_torch_func():
    fn, state = ms.functional(nn.Linear(3, 1))
    scale, x = LossScale(factor=256.0), torch.randn(5, 3)
    scaled = torch.func.grad(lambda state: scale.scale(fn(state, x).sum()))(state)
    before = {name: gradient.clone() for name, gradient in scaled.items()}
    gradients, found_inf = scale.unscale(scaled)
    assert not found_inf
    assert torch.allclose(gradients["weight"][0], x.sum(0))
    assert all(torch.equal(scaled[name], before[name]) for name in before)
    scaled["bias"][0] = math.nan
    assert scale.unscale(scaled)[1]


def test_an_overflow_skips_the_step_and_clipping_fits_between():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale = LossScale(factor=8.0)
    scale.scale(weight.sum() * 100).backward()
    assert not scale.unscale_(optimizer)
    assert weight.grad.tolist() == [100, 100]
    weight.grad = torch.tensor([1.0, math.inf])
    assert scale.step(optimizer) == LossScale(factor=4.0)
    assert weight.tolist() == [1, 1]


def test_sparse_gradients_and_parameters_without():
    table, unused = nn.Embedding(8, 2, sparse=True), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*table.parameters(), unused], lr=1.0)
    scale = LossScale(factor=4.0)
    scale.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    assert not scale.unscale_(optimizer)
    assert table.weight.grad.to_dense()[:4, 0].tolist() == [0, 2, 0, 1]


def test_it_is_a_value_that_travels():
    scale = LossScale(factor=4.0, clean_steps=7)
    assert eval(repr(scale)) == scale == LossScale(**dataclasses.asdict(scale))
    assert hash(scale) == hash(copy.copy(scale))
    with pytest.raises(dataclasses.FrozenInstanceError):
        scale.factor = 1.0


def test_float16_gradients_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.sum().backward()
    with pytest.raises(ConfigError, match=r"float16.*keep the parameters in float32"):
        LossScale().step(torch.optim.SGD([weight]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"factor": 0.0},
        {"factor": math.inf},
        {"factor": math.nan},
        {"factor": "1024"},
        {"growth": 0.5},
        {"backoff": 1.0},
        {"interval_steps": 0},
        {"clean_steps": -1},
    ],
)
def test_values_out_of_range_are_refused(arguments):
    (name,) = arguments
    with pytest.raises(ConfigError, match=f"LossScale: {name} must be"):
        LossScale(**arguments)


@pytest.mark.cuda
@pytest.mark.values
def test_a_gradient_that_is_not_finite_halves_the_scale_on_a_gpu():
    model = nn.Linear(4, 1).cuda()
    fit = ms.transform(model, {"": ms.cast(compute=torch.float16)})
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), LossScale(interval_steps=1)
    # A whole sum's gradients, 2 * 65536, are no float16 numbers.
    scale.scale(fit(torch.ones(2, 4, device="cuda")).sum() / 8).backward()
    assert scale.step(optimizer).factor == 131072.0
    model.weight.grad.fill_(math.inf)
    assert scale.step(optimizer).factor == 32768.0


def test_it_grows_to_what_float32_holds_and_no_further():
    scale = LossScale(factor=2.0**127, interval_steps=1)
    assert scale.update(False) == scale
    assert LossScale(interval_steps=3, clean_steps=1).update(False).clean_steps == 2
    assert LossScale(interval_steps=3, clean_steps=2).update(True) == LossScale(factor=32768.0, interval_steps=3)


def test_what_is_infinite_at_any_scale_is_not_an_overflow():
    with pytest.raises(CorrectnessError, match="the model or its data has produced one"):
        LossScale(factor=2.0**-40).update(True)
