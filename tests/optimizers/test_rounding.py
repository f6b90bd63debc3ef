"""bfloat16 parameters: what the two ways to round them promise, beside float32 and plain bfloat16."""

import copy
import math

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.optimizers import in_float32
from tests.support.checks import bits
from tests.support.optimizers import OPTIMIZERS, loss_of, network

EXACT, CHANCE = ms.compensate_rounding(), ms.round_stochastically(seed=3)
HOWS = {"compensated": EXACT, "stochastic": CHANCE}
BOTH = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


def nearest(values):
    """To bfloat16, ties away from zero."""
    down = (values.view(torch.int32) + 0x8000).bitwise_and(-(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), down, values).to(torch.bfloat16)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_compensated_parameters_are_those_of_float32_rounded_and_states_the_same_bits(make):
    model = network().bfloat16()
    wide = network().bfloat16().float()
    optimizer, expected = EXACT(make(model.parameters())), make(wide.parameters())
    for number in range(8):
        loss_of(model, number).backward()
        for narrow, other in zip(model.parameters(), wide.parameters(), strict=True):
            other.grad = narrow.grad.float()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        for narrow, other in zip(model.parameters(), wide.parameters(), strict=True):
            assert bits(narrow.detach()) == bits(nearest(other.detach()))
            kept = {name: value for name, value in optimizer.state[narrow].items() if name != "low_bits"}
            assert bits(kept) == bits(dict(expected.state[other]))


def part_of(how, weight):
    optimizer = how(torch.optim.SGD([weight], lr=1.0))
    optimizer.state[weight] = {}
    part = optimizer.parts[-1]
    part.begin(weight)
    return optimizer, part


def test_every_float32_survives_its_two_halves():
    random = torch.Generator().manual_seed(0)
    found = torch.randint(-(2**31), 2**31 - 1, (2**14,), generator=random, dtype=torch.int32)
    found[0] = 2**31 - 1  # not a number, with the largest bits
    found = found.view(torch.float32)
    found[1:8] = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-45, torch.inf, -torch.inf])
    weight = nn.Parameter(torch.zeros(2**14, dtype=torch.bfloat16))
    optimizer, part = part_of(EXACT, weight)  # which the part does not keep
    part.narrow(weight, torch.detach, found)
    back, is_number = part.widened(weight, torch.detach), ~found.isnan()
    assert bits(back[is_number]) == bits(found[is_number])
    assert bits(weight.detach()[is_number]) == bits(nearest(found)[is_number])
    assert back[~is_number].isnan().all()
    assert weight[~is_number].isnan().all()
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].zero_()  # by somebody who knows nothing of the other half
    changed = part.widened(weight, torch.detach)
    assert (changed.abs() < 1e-40).all()


def test_chance_is_fair_and_leaves_what_bfloat16_can_say():
    few = torch.tensor([1.0, 1.0 + 2.0**-9, 1.0 + 3 * 2.0**-10, -3.3, 1e-3, torch.inf, -torch.inf, torch.nan])
    weight = nn.Parameter(torch.zeros(8, 20000, dtype=torch.bfloat16))
    _, part = part_of(CHANCE, weight)
    state = torch.get_rng_state()
    part.narrow(weight, torch.detach, few[:, None].expand(8, 20000).contiguous())
    assert torch.equal(torch.get_rng_state(), state)
    found = weight.detach().float()
    assert [len(row.unique()) for row in found] == [1, 2, 2, 2, 2, 1, 1, 20000]  # NaN is none but itself
    assert found[[0, 5, 6], 0].tolist() == [1.0, torch.inf, -torch.inf]
    step = found[1:5].amax(1) - found[1:5].amin(1)
    assert ((found[1:5].mean(1) - few[1:5]).abs() < 4 * step * 0.5 / 20000**0.5).all()
    assert (step <= few[1:5].abs() * 2.0**-7).all()


def test_small_steps_count_over_300_of_them():
    def last_loss(dtype, how):
        torch.manual_seed(0)
        truth, x = nn.Linear(64, 8).bfloat16().float(), torch.randn(512, 64)
        model = copy.deepcopy(truth)
        with torch.no_grad():
            model.weight.add_(0.1)
        model.to(dtype)
        optimizer = how(torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0))
        for _ in range(300):
            found = nn.functional.linear(x, model.weight.float(), model.bias.float())
            loss = (found - truth(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    expected = last_loss(torch.float32, ms.identity)
    assert last_loss(torch.bfloat16, ms.identity) > 5 * expected
    assert last_loss(torch.bfloat16, EXACT) == pytest.approx(expected, rel=0.01)
    assert last_loss(torch.bfloat16, ms.compose(ms.step_in_backward(), CHANCE)) == pytest.approx(expected, rel=0.05)


@BOTH
def test_with_moments_in_8_bits(how):
    model = nn.Linear(128, 64).bfloat16()
    optimizer = ms.compose(ms.quantize_states(), how)(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(3):
        model(torch.ones(2, 128, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state[model.weight]
    assert states["exp_avg"].dtype == states["exp_avg_sq"].dtype == torch.uint8
    kept = sum(each.nbytes for each in states.values() if isinstance(each, torch.Tensor)) / model.weight.numel()
    assert kept < (2.05 if how == CHANCE else 4.05)


@BOTH
def test_a_large_parameter_steps_in_slices_with_little_in_float32(how, monkeypatch):
    def run(least):
        monkeypatch.setattr(in_float32, "_AT_ONCE", least)
        weight = nn.Parameter(torch.linspace(-1, 1, 2**16).bfloat16())
        optimizer = how(torch.optim.AdamW([weight], lr=0.01, fused=True))
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.5)
            trace = ms.measure(optimizer.step)
        return bits(weight.detach()), bits(optimizer.state_dict()), trace.growth_bytes

    *whole, whole_bytes = run(2**20)
    *cut, cut_bytes = run(2**12)
    assert cut_bytes < whole_bytes / 8
    if how == EXACT:  # chance has its numbers by the slice
        assert cut == whole


@BOTH
def test_other_types_step_as_ever_and_the_given_optimizer_keeps_its_states(how):
    model = nn.Sequential(nn.Linear(6, 8).bfloat16(), nn.Linear(8, 2))

    def steps(optimizer, count):
        for number in range(count):
            for place, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + place))
            optimizer.step()

    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(plain, 2)
    other, expected = copy.deepcopy((model[1], plain))
    before = bits(plain.state_dict())
    optimizer = how(plain)
    steps(optimizer, 1)
    assert bits(plain.state_dict()) == before
    assert f"{how!r}: 2 parameters; 2 are not in bfloat16" in optimizer.report()
    alone = torch.optim.AdamW(other.parameters(), lr=0.01)
    alone.state.update(
        zip(other.parameters(), (expected.state[each] for each in list(expected.state)[2:]), strict=True)
    )
    for place, parameter in enumerate(other.parameters(), start=2):
        parameter.grad = torch.full_like(parameter, 0.1 * place)
    alone.step()
    assert bits(dict(other.state_dict())) == bits(dict(model[1].state_dict()))


@BOTH
def test_a_simulated_step_has_it(how):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()
    step = {"loss": lambda y, _: y.float().sum(), "hardware": "h100"}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(4, 256, dtype=torch.bfloat16)
    plain, found = (ms.profile(model, x, optimizer=each(optimizer), **step) for each in (ms.identity, how))
    weights = sum(parameter.numel() for parameter in model.parameters())
    more = found.by_category["optimizer state"] - plain.by_category["optimizer state"]
    assert more / weights == pytest.approx(0 if how == CHANCE else 6, abs=0.2)
    assert not optimizer.state
    assert ms.Plan.from_json((plan := ms.Plan({"": how})).to_json()) == plan


def test_two_roundings_and_bad_seeds_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ms.TransformError, match=r"round the same numbers; choose one"):
        ms.compose(EXACT, CHANCE)(torch.optim.SGD([weight]))
    for seed in (-1, True, 0.5):
        with pytest.raises(ms.ConfigError, match=r"round_stochastically\(seed=.*must be an? ?(int )?"):
            ms.round_stochastically(seed=seed)


@pytest.mark.parametrize("how", [ms.round_stochastically(), ms.compensate_rounding()], ids=str)
def test_states_of_other_types_are_loaded_as_plain_ones(how):
    def run(how):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = how(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        for dtype in (torch.float32, torch.float64):
            saved = optimizer.state_dict()
            model.to(dtype)
            optimizer.load_state_dict(saved)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 4, dtype=dtype)).sin().sum().backward()
                optimizer.step()
        return bits([*model.parameters(), *[optimizer.state[p]["momentum_buffer"] for p in model.parameters()]])

    assert run(how) == run(ms.identity)


def test_slices_of_a_parameter_of_a_kind_that_comes_later_have_their_own_moments(monkeypatch):
    """All slices of a parameter with more dimensions than those of the trial stepped with the last slice's moments."""
    monkeypatch.setattr(in_float32, "_AT_ONCE", 64)
    shapes = [(), (4,), (8, 8), (2, 4, 16), (2, 2, 4, 8)]

    def run(how, dtype, late):
        weights = [
            nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape).bfloat16().to(dtype)) for shape in shapes
        ]
        optimizer = how(torch.optim.AdamW(weights[: len(shapes) - late], lr=0.1))
        if late:
            optimizer.add_param_group({"params": weights[-late:]})
        for number in range(3):
            for weight in weights:
                weight.grad = torch.linspace(number, 1, weight.numel()).view_as(weight).bfloat16().to(dtype)
            optimizer.step()
        return [bits(optimizer.state[weight]["exp_avg"]) for weight in weights], weights

    expected, wide = run(ms.identity, torch.float32, 0)
    for late in (0, 2):
        moments, weights = run(EXACT, torch.bfloat16, late)
        assert moments == expected
        assert [bits(each.detach()) for each in weights] == [bits(nearest(each.detach())) for each in wide]
