"""What `optimize` and `wrap` do to an optimizer: in place for as long as they hold, and its own again afterwards."""

import copy
import logging
import sys

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.legacy import wrapped
from memscale.optimizers import TransformedOptimizer
from tests.legacy.test_wrap_plans import MIB, config, rows, spellings, stack
from tests.support.checks import bits

SMALL = config(force_optimize=True, use_8bit_optimizer=True)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model, optimizer, steps, scheduler=None):
    for number in steps:
        model(rows(8) + number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def looks(optimizer):
    """All that an optimizer is but the numbers of its states."""
    groups = [
        {key: list(map(id, value)) if key == "params" else value for key, value in group.items() if key != "lr"}
        for group in optimizer.param_groups
    ]
    kinds = {
        id(parameter): {key: getattr(value, "dtype", None) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    return type(optimizer), set(optimizer.__dict__), id(optimizer.state), optimizer.__dict__.get("step"), groups, kinds


def hooks(model):
    return [parameter._post_accumulate_grad_hooks or None for parameter in model.parameters()]


@pytest.mark.parametrize("raises", [False, True])
def test_optimize_keeps_states_in_8_bits_for_the_block_and_carries_them_back(raises):
    model = stack()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, range(2), scheduler)
    other, expected, following = copy.deepcopy((model, optimizer, scheduler))
    before = looks(optimizer)
    try:
        with ms.optimize(model, optimizer, SMALL) as executor:
            assert ms.quantize_states() in [rule.transform for rule in executor.plan]
            assert isinstance(optimizer, TransformedOptimizer)
            assert isinstance(optimizer, torch.optim.AdamW)
            train(model, optimizer, range(2, 4), scheduler)
            assert {optimizer.state[block.up.weight]["exp_avg"].dtype for block in model} == {torch.uint8}
            assert "moments of" in str(executor)
            said = bits(optimizer.state_dict()["state"])
            if raises:
                raise KeyError("the user's own")
    except KeyError:
        assert raises
    assert looks(optimizer) == before
    assert bits(optimizer.state_dict()["state"]) == said
    assert not hasattr(model, "_memscale_executor")
    # The same as the transform by hand, and plain training goes on from it.
    small = ms.quantize_states()(expected)
    following.optimizer = small
    train(other, small, range(2, 4), following)
    expected.load_state_dict(small.state_dict())
    following.optimizer = expected
    for each in ((model, optimizer, scheduler), (other, expected, following)):
        train(*each[:2], range(4, 6), each[2])
    assert bits(dict(model.state_dict())) == bits(dict(other.state_dict()))
    assert bits(optimizer.state_dict()) == bits(expected.state_dict())


EXACT = {
    "groups": ms.step_in_groups(group_bytes=64),
    "offload": ms.offload_states(),
    "disk": ms.offload_states(tier="disk"),
    "in backward": ms.compose(ms.step_in_backward(), ms.offload_states()),
}
MAKERS = {
    "AdamW": adamw,
    "fused": lambda model: adamw(model, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("how", EXACT.values(), ids=EXACT)
def test_exact_rules_leave_no_trace_in_the_training(how, make):
    """A step that was taken from the optimizer before is that of the block too: the class's own found no states."""
    closes = how is not EXACT["in backward"]  # which refuses closures

    def run(plan):
        model = stack(2)
        optimizer = make(model)
        seen, step = [], optimizer.step
        optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, range(1), scheduler)
        before = looks(optimizer), hooks(model)
        executor = wrapped(model, config(), sample_input=None, plan=plan, optimizer=optimizer)
        assert isinstance(optimizer, TransformedOptimizer) is bool(plan.of_optimizers())
        train(model, optimizer, range(1, 3), scheduler)
        model(rows(8)).square().mean().backward()
        seen.append(step((lambda: 2.0) if closes else None))
        optimizer.zero_grad()
        kept = bits(optimizer.state_dict())
        executor.detach()
        assert (looks(optimizer), hooks(model)) == before
        assert bits(optimizer.state_dict()) == kept
        train(model, optimizer, range(3, 5), scheduler)
        step()
        return bits(dict(model.state_dict())), bits(optimizer.state_dict()), seen

    assert run(ms.Plan({"*": ms.checkpoint(), "": how})) == run(ms.Plan({"*": ms.checkpoint()}))


def test_wrap_learns_the_optimizer_by_its_first_step_and_detach_gives_it_back():
    model = stack()
    ms.wrap(model, SMALL)
    optimizer = adamw(model)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before = {*optimizer.__dict__, "_opt_called"}, optimizer.step
    train(model, optimizer, range(3), scheduler)
    foreign.step()
    assert optimizer.state[model[0].up.weight]["exp_avg"].dtype == torch.uint8
    assert type(foreign) is torch.optim.SGD
    ms.detach(model)
    assert type(optimizer) is torch.optim.AdamW
    assert (set(optimizer.__dict__), optimizer.step) == before
    assert optimizer.state[model[0].up.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("verb", ["optimize", "wrap"])
def test_without_bitsandbytes_there_is_a_notice_and_states_are_in_full(verb, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    model = stack(2)
    optimizer = adamw(model)
    with ms.optimize(model, optimizer if verb == "optimize" else None, SMALL) as executor:
        assert spellings(executor.plan) == {"checkpoint"}
        train(model, optimizer, range(2))
        assert type(optimizer) is torch.optim.AdamW
    assert [message for message in caplog.messages if "use_8bit_optimizer=True: states stay in full" in message]
    assert "pip install 'memscale-transforms[bnb]'" in caplog.text


def test_an_optimizer_that_cannot_be_changed_is_left_alone_with_a_notice(caplog):
    model = stack(2)
    patched = adamw(model)
    patched.step = lambda: torch.optim.AdamW.step(patched)
    for optimizer in (torch.optim.LBFGS(model.parameters()), ms.step_in_groups(group_bytes=9)(adamw(model)), patched):
        caplog.clear()
        kind = type(optimizer)
        with ms.optimize(model, optimizer, SMALL):
            assert type(optimizer) is kind
        assert [each for each in caplog.messages if "the optimizer stays unchanged, with its states in full" in each]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [pytest.param({"use_8bit_optimizer": True}, "quantize_states", marks=pytest.mark.deep), ({}, "step_in_groups")],
)
def test_what_does_not_fit_gets_the_way_to_step_that_fits(device, fields, wanted, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    model = stack(4)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    device((3.5 if fields else 4.6) * weights / MIB)
    optimizer = adamw(model, foreach=True)
    options = ms.Config(target_gpu_utilization=1, **fields)
    with ms.optimize(model, optimizer, options, sample_input=rows(1)) as executor:
        assert wanted in spellings(executor.plan)
        assert repr(optimizer).startswith(repr(executor.plan.of_optimizers().rules[0].transform))
        train(model, optimizer, range(1))
    assert type(optimizer) is torch.optim.AdamW
    assert f"the optimizer is under the plan:\n{wanted}" in caplog.text


def test_a_larger_batch_plans_again_and_the_optimizer_keeps_its_states(device):
    model = stack(2)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    device(4.2 * weights / MIB)
    optimizer = adamw(model)
    with ms.optimize(model, optimizer, config(use_8bit_optimizer=True)) as executor:
        for count in (1, 64):
            model(rows(count)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(executor._plans.known) == 2
        assert optimizer.state[model[0].up.weight]["step"] == 2
    assert optimizer.state[model[0].up.weight]["exp_avg"].dtype == torch.float32


def test_an_exception_in_a_backward_that_steps_leaves_a_plain_optimizer():
    model = stack(2)
    optimizer = adamw(model)
    executor = wrapped(
        model, config(), sample_input=None, plan=ms.Plan({"": ms.step_in_backward()}), optimizer=optimizer
    )
    model[0].up.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows(2)).sum().backward()
    executor.detach()
    assert type(optimizer) is torch.optim.AdamW
    assert not any("Spent" in repr(parameter.grad) for parameter in model.parameters())
    optimizer.step()


def test_a_scheduler_and_a_bound_step_of_the_block_go_on_after_it():
    model = stack(2)
    optimizer = adamw(model)
    with ms.optimize(model, optimizer, SMALL):
        step = optimizer.step
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, range(1), scheduler)
    other, expected = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(1, 2), scheduler)
    model(rows(8)).square().mean().backward()
    step()
    train(other, expected, range(1, 2))
    expected.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    other(rows(8)).square().mean().backward()
    expected.step()
    assert bits(dict(model.state_dict())) == bits(dict(other.state_dict()))
