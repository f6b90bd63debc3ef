"""How the optimizer steps, as a variable of plans: chosen under the same budget, only where it is allowed."""

import copy

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.planning.stepping import NAMES
from memscale.simulation import analyse
from tests.support.checks import bits

CARD = ms.Hardware(
    name="card",
    device_type="cuda",
    memory_bytes=2**34,
    flops_per_second={"float32": 2e13},
    bandwidth_bytes_per_second=1e12,
    host_to_device_bytes_per_second=2e10,
    device_to_host_bytes_per_second=2e10,
    host_bandwidth_bytes_per_second=1e11,
    measured=True,
)
EXACT = ("step_in_groups", "offload_states", "step_in_backward")


def loss(y, _):
    return y.square().mean()


def engine(stepping=(), blocks=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(blocks)]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    config = ms.Config(mode="conservative", **options)
    step = {"optimizer": optimizer, "loss": loss, "hardware": CARD, "config": config, "stepping": stepping}
    return ms.DecisionEngine(model, torch.ones(64, 256), **step, streams=False)


@pytest.fixture(scope="module")
def alone():
    return engine().smallest().evidence.planned


@pytest.mark.deep
def test_more_ways_to_step_reach_less_and_are_never_slower():
    alone = engine(blocks=4).smallest().evidence.planned
    least = alone.taken_bytes
    grouped, below = engine(("step_in_groups",), 4), engine(EXACT, 4, enable_offloading=True)
    plans = [grouped.plan(least), below.plan(least)]
    assert all(plan.evidence.planned.taken_bytes <= least for plan in plans)
    times = [plan.evidence.planned.step_seconds for plan in plans]
    assert times[1] <= times[0] <= alone.step_seconds
    smallest = below.smallest()  # checkpoints free next to nothing here, where states are nearly all
    assert smallest.evidence.planned.taken_bytes < 0.55 * least
    assert "offload_states" in repr(smallest.of_optimizers())


def test_a_plan_with_a_rule_for_the_optimizer_trains_to_the_same_numbers(alone):
    made = engine(("step_in_groups", "step_in_backward"))
    plan = made.plan(int(0.9 * alone.taken_bytes))
    assert plan.of_optimizers()
    assert "the optimizer: step_in_" in plan.explain()
    assert ms.Plan.from_json(plan.to_json()) == plan
    model, optimizer = copy.deepcopy((made.model, made.step.optimizer))
    fit, stepping = ms.transform(made.model, plan, optimizer=made.step.optimizer)
    for module, its in ((model, optimizer), (fit, stepping)):
        for _ in range(2):
            loss(module(torch.ones(64, 256)), None).backward()
            its.step()
            its.zero_grad()
    assert bits(dict(fit.state_dict())) == bits(dict(model.state_dict()))
    with pytest.raises(ms.PlanError, match="is for an optimizer; pass it too"):
        ms.transform(made.model, plan)


def test_8_bit_states_are_for_those_who_allow_them(alone):
    assert not engine().plan(alone.taken_bytes).of_optimizers()
    allowed = engine(use_8bit_optimizer=True)
    plan = allowed.smallest()
    assert plan.of_optimizers() == ms.Plan({"": ms.quantize_states()})
    assert plan.evidence.planned.taken_bytes < 0.9 * alone.taken_bytes


def test_two_passes_that_clip_are_for_those_who_write_such_a_loop():
    made = engine((ms.step_in_backward(max_norm=0.01),))
    [strategy] = made.searches.strategies
    plan = ms.Plan(strategy.rules)
    assert plan == ms.Plan({"": ms.step_in_backward(max_norm=0.01)})
    # The second backward is in its time.
    assert 1.3 * made.plain.step_seconds < analyse(strategy.plain).step_seconds
    model, optimizer = copy.deepcopy((made.model, made.step.optimizer))
    fit, stepping = ms.transform(made.model, plan, optimizer=made.step.optimizer)
    for _ in range(2):
        loss(model(torch.ones(64, 256)), None).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        value = loss(fit(torch.ones(64, 256)), None)
        value.backward(retain_graph=True)
        value.backward()
        for each in (optimizer, stepping):
            each.step()
            each.zero_grad()
    assert bits(dict(fit.state_dict())) == bits(dict(model.state_dict()))


@pytest.mark.parametrize(
    "wrong", ["offload", ("step_in_groups", "adamw"), [ms.checkpoint()], [ms.compensate_rounding()]]
)
def test_what_is_no_way_to_step_is_refused(wrong):
    with pytest.raises(ms.ConfigError, match=r"stepping=\.\.\.\) takes optimizer transforms or their names, .*; got"):
        engine(wrong)
    with pytest.raises(ms.ConfigError, match="has step_in_backward twice; choose one"):
        engine(("step_in_backward", ms.step_in_backward(max_norm=1.0)))
    assert len(NAMES) == 4


@pytest.mark.deep
def test_a_plan_that_has_to_move_parameters_for_the_update_says_what_else_would_do():
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1024)) for _ in range(4)]
        model, x = nn.Sequential(*blocks), torch.empty(8, 1024)
    step = {"loss": lambda y, _: y.square().mean(), "hardware": "h100"}
    usual = torch.optim.AdamW(model.parameters())
    budget = int(ms.profile(model, x, optimizer=usual, **step).reserved_peak_bytes * 0.9)
    plan = ms.plan(model, x, budget=budget, optimizer=usual, **step)
    (note,) = (each for each in plan.evidence.notes if "optimizer's step holds" in each)
    assert note.endswith("AdamW(fused=True) or plan(stepping=('step_in_groups',)) would hold less")
    for optimizer, stepping in ((torch.optim.AdamW(model.parameters(), fused=True), ()), (usual, "step_in_groups")):
        other = ms.plan(model, x, budget=budget, optimizer=optimizer, stepping=stepping, **step)
        assert other.evidence.planned.step_seconds < plan.evidence.planned.step_seconds
        assert not [each for each in other.evidence.notes if "optimizer's step holds" in each]
