"""`step_in_backward`: gradients that are never there all at once, and what cannot be done without them."""

import gc

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.optimizers import quantized
from memscale.simulation.measured import training_roles
from tests.support.models import Tied
from tests.support.optimizers import OPTIMIZERS, batch, network, numbers, train, twins

ADAMW = OPTIMIZERS["AdamW"]
HOW = ms.step_in_backward()
SIZE = 64


def deep():
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(SIZE, SIZE, bias=False), nn.Tanh())])


def test_each_parameter_steps_while_backward_runs():
    model = deep()
    optimizer = HOW(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seen = []
    model[6].register_full_backward_hook(
        lambda *_: seen.extend(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    )
    model(torch.ones(2, SIZE)).sum().backward()
    assert seen[:3] + seen[4:] == [True] * 3 + [False] * 4  # its own gradient may come before or after the hook
    after = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, after, model.parameters()))


def most_gradient_bytes(how, make, backward=torch.Tensor.backward, plan=()):
    """What a step holds at most besides parameters and states."""
    model = deep()
    fit, optimizer = ms.transform(model, dict(plan)), how(make(model.parameters()))
    x = torch.ones(2, SIZE)

    def step():
        backward(fit(x).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    step()  # states
    return ms.measure(step, roles=training_roles(model, optimizer)).growth_bytes


@pytest.mark.parametrize(("name", "temporaries"), [("AdamW", 2), ("SGD with momentum", 0), ("Adam, fused, amsgrad", 0)])
def test_at_the_peak_there_are_gradients_of_two_parameters_at_most(name, temporaries):
    one, activations = SIZE * SIZE * 4, 32 * 2 * SIZE * 4
    # Next to the temporaries of a single parameter's step; plain steps have eight gradients.
    assert most_gradient_bytes(ms.identity, OPTIMIZERS[name]) >= 8 * one
    assert most_gradient_bytes(HOW, OPTIMIZERS[name]) <= (2 + temporaries) * one + activations


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_of_several_passes(accumulate):
    def run(how):
        model = network()
        optimizer = how(ADAMW(model.parameters()))
        for number in range(2 * accumulate):
            # The last layer is reached by every other pass only.
            (model if number % 2 else model[:3])(batch(number)).square().sum().backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return numbers(model, optimizer)

    assert run(ms.step_in_backward(accumulate=accumulate)) == run(ms.identity)


PLANS = {
    "checkpoint": {"*": ms.checkpoint()},
    "a whole region": {"": ms.checkpoint()},
    "offload": {"*": ms.offload(min_bytes=0)},
    "params": {"*": ms.offload(what="params", min_bytes=0)},
    "both": {"*": ms.compose(ms.checkpoint(), ms.offload(what="params", min_bytes=0))},
    "tile": {"*": ms.tile(chunks=2)},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("make", [network, Tied], ids=["network", "tied"])
def test_under_every_transform_of_the_model(plan, make):
    def run(how):
        torch.manual_seed(1)
        model = make()
        fit = ms.transform(model, plan if make is network or "" in plan else {"": next(iter(plan.values()))})
        optimizer = how(ADAMW(model.parameters()))
        for number in range(3):
            fit(batch(number)[:, : 6 if make is network else 5]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers(model, optimizer)

    assert run(HOW) == run(ms.identity)


READS = {
    "clip by norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip by value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "LossScale": lambda _, optimizer: ms.LossScale().step(optimizer),
    "GradScaler": lambda model, optimizer: scaled(model).step(optimizer),
    "the plain optimizer": lambda model, _: ADAMW(model.parameters()).step(),
    "one that fuses": lambda model, _: torch.optim.AdamW(model.parameters(), fused=True).step(),
    "a sum": lambda model, _: sum(parameter.grad.sum() for parameter in model.parameters()),
    "backward again": lambda model, _: model(batch(1)).sum().backward(),
}


def scaled(model):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_asks_for_a_gradient_that_is_gone_is_told(read):
    _, (model, optimizer) = twins(ADAMW, HOW)
    model(batch(0)).square().sum().backward()
    before = numbers(model, optimizer)
    with pytest.raises(ms.TransformError, match=r"the gradient of parameter \d of group 0 \[.*\] is gone.*clipping by"):
        read(model, optimizer)
    assert numbers(model, optimizer) == before


def backward(model):
    model(batch(0)).square().sum().backward()


def test_closures_are_refused_before_they_are_called():
    _, (_, optimizer) = twins(ADAMW, HOW)
    with pytest.raises(ms.TransformError, match=r"step\(closure\) evaluates the loss inside step\(\)"):
        optimizer.step(lambda: pytest.fail("called"))


def test_a_second_step_has_no_gradients():
    _, (model, optimizer) = twins(ADAMW, HOW)
    backward(model)
    optimizer.step()
    with pytest.raises(ms.TransformError, match=r"step\(\) again, where the gradient of .* has had its step"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_a_second_backward_without_a_step_between_is_refused():
    _, (model, optimizer) = twins(ADAMW, HOW)
    backward(model)
    model.zero_grad()
    before = numbers(model, optimizer)
    with pytest.raises(ms.TransformError, match=r"has stepped in an earlier backward.*accumulate=\.\.\.\), which is 1"):
        backward(model)
    assert numbers(model, optimizer) == before
    optimizer.step()
    model.zero_grad()
    backward(model)


@pytest.mark.parametrize(
    ("change", "how"),
    [(torch.ones_like, "replaced"), (lambda parameter: None, "taken away")],
    ids=["replaced", "taken"],
)
def test_gradients_that_change_too_late_are_noticed(change, how):
    """Plain training steps with the gradient that was put there only, or not at all."""
    _, (model, optimizer) = twins(ADAMW, HOW)
    backward(model)
    parameter = next(model.parameters())
    parameter.grad = change(parameter)
    before = numbers(model, optimizer)
    with pytest.raises(ms.CorrectnessError, match=rf"gradient of parameter 0 of group 0 .* was {how} after backward"):
        optimizer.step()
    assert numbers(model, optimizer) == before


@pytest.mark.parametrize("drop", [lambda model, optimizer: model, lambda model, optimizer: optimizer])
def test_gradients_that_are_dropped_before_the_step_are_noticed_unless_backward_failed(drop):
    _, (model, optimizer) = twins(ADAMW, HOW)
    backward(model)
    drop(model, optimizer).zero_grad()
    with pytest.raises(ms.CorrectnessError, match=r"was taken away after backward.*call zero_grad\(\) after step\(\)"):
        optimizer.step()
    model, optimizer = twins(ADAMW, HOW)[1]
    handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()
    drop(model, optimizer).zero_grad()
    optimizer.step()
    backward(model)


def test_gradients_that_it_cannot_step_with():
    table = nn.Embedding(8, 2, sparse=True)
    optimizer = HOW(torch.optim.SGD(table.parameters(), lr=0.1))
    before = table.weight.detach().clone()
    with pytest.raises(ms.TransformError, match=r"is torch\.sparse_coo; give such parameters an optimizer"):
        table(torch.tensor([1])).sum().backward()
    _, (model, other) = twins(ADAMW, HOW)
    loss = model(batch(0)).square().sum()
    with (
        pytest.warns(UserWarning, match="create_graph"),
        pytest.raises(ms.TransformError, match="has a graph that needs the parameter unchanged"),
    ):
        loss.backward(create_graph=True)
    assert torch.equal(table.weight, before)
    assert other
    assert optimizer
    model.zero_grad()  # a gradient with a graph is a circle


def test_two_optimizers_that_step_one_parameter_in_backward():
    _, (model, optimizer) = twins(ADAMW, HOW)
    another = HOW(optimizer)
    with pytest.raises(ms.TransformError, match=r"another optimizer steps .* in backward too; drop one of the two"):
        backward(model)
    model.zero_grad()
    del optimizer
    gc.collect()  # the traceback
    train(model, another, [1])
    with pytest.raises(ms.TransformError, match=r"under step_in_backward\(\) cannot be put under .*accumulate=2\) too"):
        ms.step_in_backward(accumulate=2)(another)


def test_a_job_of_several_processes_with_whole_parameters_is_refused(monkeypatch):
    _, (model, optimizer) = twins(ADAMW, HOW)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ms.TransformError, match="is averaged over them after it is complete"):
        backward(model)
    assert optimizer


def test_profile_sees_the_gradients_go():
    model = nn.Sequential(*deep(), nn.Linear(SIZE, 1))
    plain = ADAMW(model.parameters())
    x, loss = torch.ones(2, SIZE), (lambda y, _: y.square().mean())
    before = numbers(model, plain)
    expected = ms.profile(model, x, optimizer=plain, loss=loss)
    profile = ms.profile(model, x, optimizer=HOW(plain), loss=loss)
    saved_bytes = expected.peak_bytes - profile.peak_bytes
    assert saved_bytes >= 6 * SIZE * SIZE * 4
    assert profile.by_category["optimizer state"] == expected.by_category["optimizer state"]
    assert numbers(model, plain) == before


# ---------------------------------------------------------------------------------------- clipping, in two passes

CLIPS = ms.step_in_backward(max_norm=0.5)


def two_passes(loss):
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("scale", [1e-3, 1.0, float("inf")], ids=["below it", "above it", "not finite"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_passes_clip_by_the_norm_of_all_gradients_to_the_bits_of_clip_grad_norm(make, scale):
    if make is OPTIMIZERS["Muon"]:
        pytest.skip("it steps some of the parameters, by whose norm clip_grad_norm_ would not clip")
    (plain, expected), (model, optimizer) = twins(make, CLIPS)
    for number in (2, 3):
        (plain(batch(number)).square().sum() * scale).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        expected.step()
        plain.zero_grad()
        two_passes(model(batch(number)).square().sum() * scale)
        optimizer.step()
        optimizer.zero_grad()
    assert numbers(model, optimizer) == numbers(plain, expected)


@pytest.mark.parametrize("plan", [{}, {"*": ms.checkpoint()}], ids=["plain", "checkpoint"])
def test_two_passes_hold_no_more_than_one(plan):
    one, activations = SIZE * SIZE * 4, 64 * 2 * SIZE * 4
    assert most_gradient_bytes(CLIPS, torch.optim.SGD, two_passes, plan) <= 2 * one + activations


def test_what_two_passes_refuse():
    model = network()
    optimizer = CLIPS(ADAMW(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(batch(0)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(
        ms.TransformError, match=r"parameter 0 .* was measured and has not stepped; before step\(\) call"
    ):
        optimizer.step()
    optimizer.zero_grad()
    two_passes(model(batch(1)).square().sum() * 0)  # the first of another graph measures again
    optimizer.step()
    optimizer.zero_grad()
    model(batch(0)).square().sum().backward()
    with pytest.raises(ms.CorrectnessError, match="is not the one whose norm was measured"):
        model(batch(1)).square().sum().backward()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ms.TransformError, match="was not measured"):
        optimizer.step()
    decayed = [value * (1 - 0.05 * 0.01) for value in before]
    assert all(map(torch.equal, decayed, model.parameters()))  # one step, of gradients that were zero
    with pytest.raises(ms.TransformError, match=r"by the norm of all gradients .* would have 2 of its parameters here"):
        ms.transform(model, {"0": CLIPS, "": ms.step_in_groups(group_bytes=8)}, optimizer=ADAMW(model.parameters()))
    for options, message in [
        ({"max_norm": 0}, "must be positive and finite"),
        ({"max_norm": True}, "must be positive and finite"),
        ({"max_norm": 1.0, "accumulate": 2}, "put the micro-batches into one loss"),
    ]:
        with pytest.raises(ms.ConfigError, match=message):
            ms.step_in_backward(**options)


def test_a_simulated_step_has_both_passes():
    model = deep()
    step = {"loss": lambda y, _: y.square().sum(), "hardware": "h100"}
    profiles = [
        ms.profile(model, torch.ones(2, SIZE), optimizer=how(torch.optim.SGD(model.parameters())), **step)
        for how in (HOW, CLIPS)
    ]
    assert profiles[1].flops > 1.5 * profiles[0].flops
    assert profiles[1].peak_bytes <= 1.02 * profiles[0].peak_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's
def test_compiled_between_and_around_steps():
    """Gradients that are used up are there while a model is compiled for another batch, or a whole step is."""

    def losses(how, *, compiled_step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = how(ADAMW(model.parameters()))
        forward = torch.compile(model, backend="eager")

        def step(x):
            loss = forward(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(step, backend="eager") if compiled_step else step
        return [run(torch.ones(rows, 4)).item() for rows in (2, 3, 4)]

    for compiled_step in (False, True):
        torch._dynamo.reset()
        assert losses(HOW, compiled_step=compiled_step) == losses(ms.identity, compiled_step=False)

    model = deep()
    optimizer = HOW(ADAMW(model.parameters()))
    model(torch.ones(2, SIZE)).sum().backward()
    norm = torch.compile(lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]), backend="eager")
    with pytest.raises(ms.TransformError, match=r"the gradient of parameter 0 .* is gone"):
        norm()
    optimizer.step()
    torch._dynamo.reset()


def test_options_that_change_too_late_are_noticed():
    _, (model, optimizer) = twins(ADAMW, HOW)
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ms.CorrectnessError, match=r"'lr' of group 0 was changed from 0\.05 to 0\.5 after the backward"):
        optimizer.step()


def test_a_graph_that_still_needs_the_parameter_is_refused_by_autograd():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = HOW(OPTIMIZERS["Lion"]([first, second]))  # which changes .data
    hidden = second * first.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (hidden * first).sum().backward()
    assert optimizer


@pytest.mark.parametrize("how", [HOW, ms.compose(HOW, ms.step_in_groups(group_bytes=1))], ids=repr)
def test_a_gradient_that_zero_grad_sets_to_zero_steps_where_the_next_loss_does_not_reach(how):
    def run(how):
        weights = nn.ParameterList([torch.ones(4), torch.ones(4), torch.ones(4)])
        optimizer = how(torch.optim.AdamW(weights, lr=0.1))
        for number in range(7):
            optimizer.zero_grad(set_to_none=number == 4)
            sum(weight.sum() for at, weight in enumerate(weights) if (number + at) % 3).backward()
            optimizer.step()
        return numbers(weights, optimizer)

    assert run(how) == run(ms.identity)


def test_a_parameter_that_leaves_its_group_after_backward_is_noticed():
    _, (model, optimizer) = twins(ADAMW, HOW)
    backward(model)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ms.CorrectnessError, match=r"taken out of a group, or moved, after the backward"):
        optimizer.step()


def test_passes_before_zero_grad_do_not_count():
    def run(how):
        model = network()
        optimizer = how(ADAMW(model.parameters()))
        for number in range(3):
            backward(model)
            if number == 1:
                optimizer.zero_grad()
                backward(model)
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return numbers(model, optimizer)

    assert run(ms.step_in_backward(accumulate=2)) == run(ms.identity)


@pytest.mark.parametrize(
    "inner", [ms.identity, ms.compensate_rounding(), ms.offload_states(tier="disk"), ms.quantize_states()]
)
def test_gradients_in_another_type_than_their_parameter(inner, monkeypatch):
    """The placeholder of a gradient, and gradients of slices, had the type of the parameter."""
    monkeypatch.setattr(quantized, "_LEAST", 16)
    monkeypatch.setattr(quantized, "_LEAST_BYTES", 1)

    def run(how):
        model = network().bfloat16()
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        optimizer = how(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        for number in range(4):
            model[: 1 if number == 2 else 6](batch(number).bfloat16()).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)
        return numbers(model, optimizer)

    assert run(ms.compose(HOW, inner)) == run(inner)
