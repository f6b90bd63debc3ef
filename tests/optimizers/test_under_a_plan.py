"""`transform(model, plan, optimizer=...)`: rules for the optimizer beside those for modules, by path."""

import copy

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits
from tests.support.optimizers import OPTIMIZERS, batch, network, numbers, train, trained

IN_BACKWARD, IN_GROUPS, OFFLOADED = ms.step_in_backward(), ms.step_in_groups(group_bytes=64), ms.offload_states()
PLAN = ms.Plan([("0", ms.checkpoint()), ("0", IN_BACKWARD), ("3.weight", OFFLOADED), ("**.bias", IN_GROUPS)])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_parameter_trains_under_its_own_rules_from_the_middle_of_training_on(make):
    model, original = trained(make, 2)
    plain, expected = copy.deepcopy((model, original))
    before = bits(original.state_dict()), [dict(module.__dict__) for module in model.modules()]
    weights_only = len(original.param_groups[0]["params"]) < 8  # Muon
    plan = ms.Plan([(rule.pattern, rule.transform) for rule in PLAN if not (weights_only and "bias" in rule.pattern)])
    fit, optimizer = ms.transform(model, plan, optimizer=original)
    assert isinstance(optimizer, type(original))
    for number in (2, 3):
        fit(batch(number)).square().sum().backward()
        stepped = [name for name, parameter in model.named_parameters() if "Spent" in repr(parameter.grad)]
        assert stepped == (["0.weight"] if weights_only else ["0.weight", "0.bias"])
        optimizer.step()
        model.zero_grad()
    assert (bits(original.state_dict()), [dict(module.__dict__) for module in model.modules()]) == before
    train(plain, expected, [2, 3])
    assert numbers(model, optimizer) == numbers(plain, expected)
    other = copy.deepcopy(optimizer)
    assert repr(other) == repr(optimizer)


def test_a_plan_with_rules_for_optimizers_is_data_and_says_how_it_is_applied():
    assert ms.Plan.from_json(PLAN.to_json()) == PLAN
    assert "optimizer" in PLAN.to_python().splitlines()[-1]
    names = {"model": network()}
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    exec(PLAN.to_python(), names)
    assert names["plan"] == PLAN
    assert names["optimizer"]._assigned.how(names["model"][3].weight) == OFFLOADED
    assert names["fit"][0].weight is names["model"][0].weight


WRONG = {
    "3.weihgt": r"'3\.weihgt' matches no parameter of this optimizer, nor a module with one; the nearest are '3\.w",
    "frozen": "'frozen' matches parameters that this optimizer does not have",
}


@pytest.mark.parametrize(("pattern", "message"), WRONG.items(), ids=WRONG)
def test_rules_that_match_nothing_are_refused(pattern, message):
    model = network()
    model.frozen = nn.Linear(2, 2)
    own = [parameter for name, parameter in model.named_parameters() if "frozen" not in name]
    with pytest.raises(ms.PlanError, match=message):
        ms.transform(model, {pattern: IN_BACKWARD}, optimizer=torch.optim.AdamW(own))


def test_what_cannot_be_is_refused_and_changes_nothing():
    model, other = network(), network()
    optimizer = torch.optim.AdamW([*model.parameters(), *other[0].parameters()])
    with pytest.raises(ms.TransformError, match=r"2 of 10 parameters that the Sequential lacks.*8 of group 0 \[8, 6\]"):
        ms.transform(model, {"": IN_BACKWARD}, optimizer=optimizer)
    contradicting = [("0", IN_BACKWARD), ("**.weight", ms.step_in_backward(accumulate=2))]
    with pytest.raises(ms.TransformError, match=r"'0\.weight': an optimizer under step_in_backward\(\) cannot be put"):
        ms.transform(model, contradicting, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        ms.TransformError,
        match=r"^\[step_in_backward\(\) on 2, identity on \d+ parameters\]: LBFGS .* one parameter at a time",
    ):
        ms.transform(model, {"0": IN_BACKWARD}, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ms.TransformError, match=r"must be a torch\.optim\.Optimizer or None, got Sequential"):
        ms.transform(model, {"0": IN_BACKWARD}, optimizer=model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_profile_takes_the_rules_and_leaves_nothing_on_the_parameters():
    model, optimizer = trained(OPTIMIZERS["AdamW, foreach"], 1)
    before, step = numbers(model, optimizer), {"optimizer": optimizer, "loss": lambda y, _: y.square().sum()}
    plan = {"": IN_BACKWARD}  # a checkpoint keeps a random state, which is more than this network
    profiler = ms.MemoryProfiler(model, plan=plan, **step)
    profile, plain = profiler.profile(batch(0)), ms.profile(model, batch(0), **step)
    assert profile.by_category["optimizer state"] == plain.by_category["optimizer state"]
    assert profile.peak_bytes < plain.peak_bytes
    model(batch(0)).square().sum().backward()  # which does not step while the profiler is there
    assert model[0].weight.grad.count_nonzero()
    assert numbers(model, optimizer) == before
    with pytest.raises(ms.PlanError, match="is for an optimizer; pass it too"):
        ms.profile(model, batch(0), plan=plan, loss=step["loss"])
