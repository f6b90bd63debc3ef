"""`quantize_states`: what is rounded and by how much, what is not, and that training goes on as it would."""

import copy
import sys

import bitsandbytes
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.cli.training import Job, gpt2, read_text
from memscale.optimizers import blockwise, in_float32, quantized
from memscale.optimizers.separability import MomentState, Separability
from tests.support.checks import bits
from tests.support.optimizers import OPTIMIZERS, network, numbers, train, trained

HOW = ms.quantize_states()
LARGEST_ERROR = {True: 0.012, False: 0.006}  # of a block's largest magnitude


@pytest.fixture
def small(monkeypatch):
    """Small moments are quantised too, a parameter at a time."""
    monkeypatch.setattr(quantized, "_LEAST", 1)
    monkeypatch.setattr(quantized, "_LEAST_BYTES", 1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block", [64, 256, 4096])
def test_numbers_come_back_as_near_as_promised_and_have_the_same_codes_again(signed, block):
    blockwise.prepare(torch.device("cpu"))
    random = torch.Generator().manual_seed(block)
    values = torch.randn(3 * 4096 + 13, generator=random) * 10 ** torch.randn(3 * 4096 + 13, generator=random)
    values = values if signed else values.square()
    values[::7] = 0.0
    values[4096:8192] = 0.0
    codes, largest = blockwise.quantized(values, block, signed=signed)
    back = blockwise.restored(codes, largest, block, torch.float32, signed=signed)
    scale = largest.repeat_interleave(block)[: len(values)]
    assert ((back - values).abs() <= LARGEST_ERROR[signed] * scale).all()
    assert (back[values == 0] == 0).all()
    assert signed or (back[values != 0] != 0).all()
    again = blockwise.quantized(back, block, signed=signed)
    assert bits(again) == bits((codes, largest))
    values[5] = float("nan")
    assert blockwise.restored(*blockwise.quantized(values, block, signed=signed), block, torch.float32, signed=signed)[
        5
    ].isnan()


KEPT = {"SGD with momentum": {"momentum_buffer"}, "Muon": {"momentum_buffer"}, "Lion": {"exp_avg"}}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_moments_are_in_8_bits_and_each_step_is_that_of_the_optimizer_over_what_they_say(make, small, request):
    model, plain = trained(make, 2)
    other = copy.deepcopy(model)
    optimizer = HOW(plain)
    before = bits(plain.state_dict())
    for number in range(2, 4):
        reference = make(other.parameters())  # a plain one, from the numbers that the quantised one has
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(other, reference, [number])
        train(model, optimizer, [number])
        assert bits(dict(other.state_dict())) == bits(dict(model.state_dict()))
        for (_, states), (_, expected) in zip(optimizer.state.items(), reference.state.items(), strict=True):
            names = KEPT.get(request.node.callspec.id, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
            assert all(states[name].dtype == torch.uint8 for name in names & states.keys())
            assert {name for name in states if not name.endswith(".largest")} == expected.keys()
    assert bits(plain.state_dict()) == before


def test_a_large_parameter_steps_in_slices_to_the_same_numbers(monkeypatch):
    def run():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(40, 1000))
        optimizer = HOW(torch.optim.AdamW([weight, nn.Parameter(torch.ones(3))], fused=True, lr=0.1))
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            trace = ms.measure(optimizer.step)
        return bits(weight), bits(optimizer.state_dict()), trace.growth_bytes

    monkeypatch.setattr(quantized, "_FEWEST", 1)
    *whole, whole_bytes = run()
    monkeypatch.setattr(quantized, "_LEAST_BYTES", 1)
    *sliced, sliced_bytes = run()
    assert sliced == whole
    assert sliced_bytes < whole_bytes / 4


def test_what_is_small_or_no_moment_stays_and_the_report_says_which():
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = HOW(torch.optim.Adam(model.parameters()))
    assert "in full, since they have not stepped yet: parameter 0 of group 0" in optimizer.report()
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    kept = [name for name, each in model.named_parameters() if optimizer.state[each]["exp_avg"].dtype == torch.float32]
    assert kept == ["1.bias", "2.weight", "2.bias"]
    text = optimizer.report()
    assert "quantize_states(): moments of 2 parameters, 182 KiB in 46.2 KiB" in text
    assert "in full, since they have fewer than 4096 numbers: parameter 2 of group 0 [64], parameter 3" in text
    unused = model[0].weight[8:].detach().clone()
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    assert bits(model[0].weight[8:].detach()) == bits(unused)  # zero stays zero
    rprop = HOW(torch.optim.Rprop([weight := nn.Parameter(torch.ones(64, 64))]))
    weight.grad = torch.ones_like(weight)
    rprop.step()
    assert {name: value.dtype for name, value in rprop.state[weight].items() if name != "step"} == {
        "prev": torch.uint8,
        "step_size": torch.float32,
        "prev.largest": torch.float32,
    }


def test_moments_in_float64_stay_in_full_however_large_their_parameter_is():
    """The kernels take none. A large share of the numbers steps in slices, whose moments were rounded all the same."""
    optimizer = HOW(torch.optim.Adam([weight := nn.Parameter(torch.ones(128, 128, dtype=torch.float64))]))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float64
    assert "in full, by type or layout: parameter 0 of group 0" in optimizer.report()


@pytest.mark.parametrize(("dtype", "last_place"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8)])
def test_states_that_an_optimizer_has_in_8_bits_itself_stay_as_they_are(dtype, last_place, monkeypatch):
    monkeypatch.setattr(quantized, "_LEAST_BYTES", 1)  # else in one piece
    monkeypatch.setattr(in_float32, "_AT_ONCE", 2**13)
    values = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def stepped(how, dtype):
        weight = nn.Parameter(values[0].to(dtype))
        optimizer = how(bitsandbytes.optim.AdamW8bit([weight], lr=0.1))
        for gradient in values[1:]:
            weight.grad = gradient.to(dtype)
            optimizer.step()
        return weight.detach().float(), optimizer

    expected, _ = stepped(ms.identity, torch.float32)
    weight, optimizer = stepped(ms.compose(HOW, ms.compensate_rounding()), dtype)
    assert "in full, since no state is a moment: parameter 0" in optimizer.report()
    assert ((weight - expected).abs() <= last_place * expected.abs()).all()


def test_without_bitsandbytes_it_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ms.RuntimeUnavailable, match=r"needs bitsandbytes, .*; pip install 'memscale-transforms\[bnb\]'"
    ):
        HOW(torch.optim.AdamW(network().parameters()))


@pytest.mark.parametrize("wrong", [{"bits": 4}, {"bits": True}, {"block": 100}, {"block": 0}, {"block": "256"}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ms.ConfigError, match=r"quantize_states\((bits|block)=.*\) must be"):
        ms.quantize_states(**wrong)


@pytest.mark.parametrize("hardware", [pytest.param(None, marks=pytest.mark.deep), "h100"])
def test_a_profile_counts_a_quarter_of_the_states_and_leaves_everything(hardware):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    plain = torch.optim.AdamW(model.parameters(), foreach=False)
    step = {"loss": lambda y, _: y.sum(), "hardware": hardware}
    before, after, by_plan = (
        ms.profile(model, torch.ones(2, 512), **step, **how)
        for how in ({"optimizer": plain}, {"optimizer": HOW(plain)}, {"optimizer": plain, "plan": {"": HOW}})
    )
    states = before.by_category["optimizer state"]
    # What is left is a quarter of them. On a CPU those of a layer are in full, too, with what the step makes; on a card
    # the step makes neither, but a flag for each number of a layer.
    least, most = (0.73 - 3 / 12, 0.75) if hardware is None else (0.75, 0.75 + 1 / 12)
    assert least <= (before.peak_bytes - after.peak_bytes) / states <= most
    assert by_plan.peak_bytes == after.peak_bytes
    assert not plain.state
    optimizer = HOW(plain)
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    trained = numbers(model, optimizer)
    ms.profile(model, torch.ones(2, 512), optimizer=optimizer, **step)
    assert numbers(model, optimizer) == trained


@pytest.mark.deep
def test_300_steps_of_the_demo_have_the_loss_of_float32_within_a_hundredth():
    losses = [_losses(how) for how in (ms.identity, HOW)]
    smooth, quantised = (torch.tensor(each).unfold(0, 20, 1).mean(1) for each in losses)
    assert losses[0] != losses[1]
    assert smooth[-1] < 0.6 * smooth[0]
    assert ((quantised - smooth).abs() <= 0.01 * smooth).all()


def _losses(how):
    job = Job(layers=2, width=128, batch=8, seq=64, steps=300, device=torch.device("cpu"))
    text, starts, losses = read_text(), torch.Generator().manual_seed(0), []
    model = gpt2(job)
    optimizer = how(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(job.steps):
        rows = torch.randint(len(text) - job.seq, (job.batch,), generator=starts).tolist()
        ids = torch.stack([text[row : row + job.seq] for row in rows]).long()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_moments_are_quantized_in_the_same_order_in_every_process():
    names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "prev", "slow", "square_avg"]
    moments = frozenset(MomentState(1, torch.float32, name, torch.float32, True) for name in names)
    evidence = Separability(frozenset(), moments, True, frozenset())
    assert list(evidence.moments_of(torch.ones(3), torch.float32)) == names


def test_moments_of_every_kind_of_parameter_are_in_8_bits_in_one_group_and_in_a_later_one(small):
    """The trial had four kinds of a group, and none of a group that was added: moments of the others stayed in full."""
    shapes = [(), (64,), (8, 8), (4, 4, 4), (2, 4, 4, 2), (2, 2, 2, 4, 2)]
    some = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = ms.quantize_states(block=64)(torch.optim.AdamW(some))
    late = [
        nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes for dtype in (torch.float32, torch.bfloat16)
    ]
    late.append(nn.Parameter(torch.ones(2, 2, 2, 2, 2, 2)))
    optimizer.add_param_group({"params": late})
    for parameter in (*some, *late):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(optimizer.state[each]["exp_avg"].dtype == torch.uint8 for each in (*some, *late) if each.dim())
