"""The host of a simulated step: what it takes for operators, views, modules, regions and saved tensors."""

import dataclasses

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.hardware import host_calls

CARD = ms.Hardware.named("h100")
KINDS = ("operator", "backward", "view", "module")
NOTHING = 1e-12


def seconds(hardware, plan=None, updates=False, **calls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    hardware = dataclasses.replace(hardware, call_seconds=dict.fromkeys(KINDS, NOTHING) | calls)
    step = {"loss": lambda y, _: y.sum(), "plan": plan, "hardware": hardware}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if updates else None
    return ms.profile(model, torch.ones(2, 4), optimizer=optimizer, **step).step_seconds


def test_a_step_takes_what_its_calls_take():
    # Forward: two products, a relu, a sum, and the gradient that backward begins with. Backward: of the
    # products three without that of the batch, two sums of biases, one threshold.
    assert seconds(CARD, operator=1.0) == pytest.approx(5, abs=0.01)
    assert seconds(CARD, backward=1.0) == pytest.approx(6, abs=0.01)
    assert seconds(CARD, module=1.0) == pytest.approx(5, abs=0.01)
    more = seconds(CARD, updates=True, operator=1.0) - seconds(CARD, operator=1.0)
    assert more == pytest.approx(1, abs=0.01)
    assert seconds(CARD, view=1.0) >= 2 + 2  # at least a transposed weight of each product, forth and back


def test_a_checkpoint_calls_its_modules_again_and_takes_time_itself():
    plan = {"0": ms.checkpoint()}
    again = seconds(CARD, plan, view=1.0) - seconds(CARD, view=1.0)
    assert 1 <= again <= 4  # the weight of the product is transposed again, and what is kept is cut off from its graph
    # The transformed forward, and two runs under hooks; two modules in it, run again; two tensors saved, twice.
    more = seconds(CARD, plan, module=1.0) - seconds(CARD, module=1.0)
    calls = host_calls(dataclasses.replace(CARD, call_seconds={"module": 1.0}))
    assert more == pytest.approx(2 + 3 * calls.region + 4 * calls.saved, rel=1e-3)
    more = seconds(CARD, plan, operator=1.0) - seconds(CARD, operator=1.0)
    assert more == pytest.approx(2 + 3 * calls.region + 4 * calls.saved, rel=1e-3)  # that product and the relu again


def test_policies_take_time_to_look():
    calls = host_calls(dataclasses.replace(CARD, call_seconds={"module": 1.0}))
    took = {
        policy: seconds(CARD, {"0": ms.checkpoint(policy=policy)}, module=1.0)
        for policy in (None, ms.policies.dots_saveable, ms.policies.save_only_these_names("none"))
    }
    plain, *watched = took.values()
    # Transposed weight, product and relu, and again until the relu has saved its result; aliases of what is saved.
    assert all(5 <= (each - plain) / calls.watched <= 10 for each in watched)


def test_a_measured_host_replaces_the_one_that_is_assumed():
    fast = dict.fromkeys(KINDS, 1e-7)
    assert seconds(CARD, **fast) < 0.5 * ms.profile(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)), torch.ones(2, 4),
        loss=lambda y, _: y.sum(), hardware=CARD,
    ).step_seconds  # fmt: skip
    with pytest.raises(ms.ConfigError, match=r"call_seconds=.*'operator', 'backward', 'view', 'module'"):
        dataclasses.replace(CARD, call_seconds={"kernel": 1e-6})
