"""Gradients and weights of an accelerator's parameters on their way to the host's step and back, at the worst moments.

There is no accelerator: CPU tensors are taken for tensors of one, whose copies happen when a seed says so.
"""

import random

import pytest
import torch

import memscale as ms
from memscale.optimizers import offloaded, on_host
from memscale.runtime import Runtime
from tests.support.adversarial_device import AdversarialDevice
from tests.support.checking.checked_engine import CheckedRuntime
from tests.support.optimizers import batch, network, numbers, train

HOWS = {
    "step": ms.offload_states(),
    "in groups": ms.compose(ms.step_in_groups(group_bytes=200), ms.offload_states()),
    "in backward": ms.compose(ms.step_in_backward(), ms.offload_states()),
    "inside": ms.compose(ms.offload_states(), ms.step_in_backward()),
    "disk": ms.offload_states(tier="disk"),
    "disk in backward": ms.compose(ms.step_in_backward(), ms.offload_states(tier="disk")),
}


def adamw(parameters, **how):
    return torch.optim.AdamW(parameters, lr=0.05, **how)


@pytest.fixture(autouse=True)
def _an_accelerator(monkeypatch):
    monkeypatch.setattr(on_host, "device_type", lambda _: "cuda")
    monkeypatch.setattr(on_host, "_LEAST_BYTES", 16)
    monkeypatch.setattr(offloaded, "_GROUP_BYTES", 400)


def runtime(seed, *, failing=0.0, caps=None, make=CheckedRuntime):
    draw = random.Random(seed)
    caps = caps or {"pinned": draw.choice([2000, 1 << 16]), "pageable": 2000, "disk": 1 << 16}

    def fails():
        return OSError(28, "No space left on device") if draw.random() < failing else None

    device = AdversarialDevice(draw.randrange, caps, fails=fails, patience=1 << 20)
    return make(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=draw.randrange(4)), backend=device)


@pytest.fixture(scope="module")
def expected():
    plain = network()
    optimizer = adamw(plain.parameters(), fused=True)
    train(plain, optimizer, range(3))
    return numbers(plain, optimizer)[0]


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_step_waits_for_what_it_takes_and_whoever_reads_for_what_it_makes(how, expected):
    for seed in range(3):
        model = network()
        optimizer = how.on(runtime(seed, make=Runtime if "disk" in repr(how) else CheckedRuntime))(
            adamw(model.parameters())
        )
        train(model, optimizer, range(3))
        assert numbers(model, optimizer)[0] == expected, seed


@pytest.mark.parametrize("how", [HOWS["step"], HOWS["in backward"]], ids=["step", "in backward"])
def test_parameters_on_the_host_step_beside_those_that_come(monkeypatch, how, expected):
    """As those that stream do beside a loss head that stays."""
    monkeypatch.setattr(on_host, "device_type", lambda tensor: "cuda" if tensor.dim() == 2 else "cpu")
    model = network()
    optimizer = how.on(runtime(2))(adamw(model.parameters(), fused=True))
    train(model, optimizer, range(3))
    assert numbers(model, optimizer)[0] == expected


@pytest.mark.parametrize("how", [HOWS["step"], HOWS["in backward"]], ids=["step", "in backward"])
def test_a_copy_that_fails_is_made_by_pytorch(how, expected):
    for seed in range(6):
        model = network()
        caps = {"disk": 1 << 16}
        optimizer = how.on(runtime(seed, failing=0.5, caps=caps))(adamw(model.parameters()))
        train(model, optimizer, range(3))
        assert numbers(model, optimizer)[0] == expected, seed


@pytest.mark.parametrize("inner", [ms.round_stochastically(), ms.compensate_rounding()], ids=repr)
@pytest.mark.parametrize("how", [HOWS["step"], HOWS["in backward"], HOWS["disk"]], ids=["step", "in backward", "disk"])
def test_what_rounds_rounds_the_same_there(monkeypatch, how, inner):
    def run(transform, make):
        model = network().to(torch.bfloat16)
        optimizer = transform(make(model.parameters()))
        for number in range(3):
            model(batch(number).to(torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers(model, optimizer)[0]

    caps = {"pinned": 1 << 16, "disk": 1 << 18}
    found = run(ms.compose(how, inner).on(runtime(5, caps=caps, make=Runtime)), adamw)
    monkeypatch.setattr(on_host, "device_type", lambda _: "cpu")
    assert found == run(inner, lambda parameters: adamw(parameters, fused=True))


def fails_at(model, number):
    """Let the backward of `model` fail once at one of its layers."""

    def fail(module, inputs, outputs):
        outputs.register_hook(lambda gradient: 1 / 0)

    return model[number].register_forward_hook(fail)


@pytest.mark.parametrize("then", ["step", "zero_grad", "state_dict", "add_param_group"])
def test_what_is_due_when_a_backward_fails_steps_all_the_same(monkeypatch, then):
    """Those whose gradients were complete step, as they do on a device where none waits."""

    def run(model, optimizer):
        train(model, optimizer, [0])
        handle = fails_at(model, 1)
        with pytest.raises(ZeroDivisionError):
            model(batch(1)).square().sum().backward()
        handle.remove()
        if then == "state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
        elif then == "add_param_group":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1.0})
        elif then == "step":
            optimizer.step()
        optimizer.zero_grad()
        found = numbers(model, optimizer)[0]
        if then == "step":
            train(model, optimizer, [2])
        return found, numbers(model, optimizer)[0]

    model = network()
    found = run(model, HOWS["in backward"].on(runtime(3))(adamw(model.parameters())))
    monkeypatch.setattr(on_host, "device_type", lambda _: "cpu")
    plain = network()
    assert found == run(plain, HOWS["in backward"](adamw(plain.parameters(), fused=True)))


def test_no_room_for_what_comes_is_an_error_and_changes_nothing():
    model = network()
    optimizer = HOWS["step"].on(runtime(1, caps={"pinned": 64}))(adamw(model.parameters()))
    before = numbers(model, optimizer)
    model(batch(0)).square().sum().backward()
    with pytest.raises(ms.RuntimeUnavailable, match="no tier has room for"):
        optimizer.step()
    optimizer.zero_grad()
    assert numbers(model, optimizer) == before
