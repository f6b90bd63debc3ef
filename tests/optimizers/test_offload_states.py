"""`offload_states`: where states live, and that the step there is the optimizer's own."""

import gc

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.optimizers import on_host
from memscale.runtime import Runtime
from memscale.runtime.backends.host import HostBackend
from memscale.simulation.measured import training_roles
from tests.support.optimizers import OPTIMIZERS, batch, network, numbers, train, trained, twins

ADAMW = OPTIMIZERS["AdamW"]
HOW = ms.offload_states()
SIZE = 64


@pytest.fixture(autouse=True)
def _small_states_move_too(monkeypatch):
    monkeypatch.setattr(on_host, "_LEAST_BYTES", 16)


def on_disk(runtime):
    return runtime.stats()["cpu"].live_bytes.get("disk", 0)


def moments(state_dict):
    return [state[key] for state in state_dict["state"].values() for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("how", [HOW, ms.offload_states(tier="disk")], ids=repr)
def test_states_are_on_the_tier_and_go_with_the_optimizer(how):
    runtime = Runtime()
    model, original = trained(ADAMW, 1)
    held = sum(tensor.nbytes for tensor in moments(original.state_dict()) if tensor.nbytes >= 16)
    optimizer = how.on(runtime)(original)
    assert held <= on_disk(runtime) <= held + 4096 * len(list(model.parameters())) * 2  # in whole pages
    held = on_disk(runtime)
    train(model, optimizer, [1, 2])
    assert on_disk(runtime) == held
    optimizer.load_state_dict(original.state_dict())
    assert on_disk(runtime) == held
    optimizer.state.clear()
    del optimizer
    gc.collect()
    assert on_disk(runtime) == 0


@pytest.mark.parametrize("how", [HOW, ms.offload_states(tier="disk")], ids=repr)
@pytest.mark.parametrize("new", [False, True], ids=["there", "new"])
def test_no_state_is_left_in_memory_after_a_step(how, new):
    def grown(how):
        model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(8)])
        optimizer = how(torch.optim.AdamW(model.parameters(), fused=True))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if not new:
            optimizer.step()
        return ms.measure(optimizer.step, roles=training_roles(model)).end_bytes, model, optimizer

    states = 2 * 8 * SIZE * SIZE * 4
    plain, *_ = grown(ms.identity)
    ours, _, optimizer = grown(how)
    assert plain - ours == (states if new else 0)
    assert sum(tensor.nbytes for tensor in moments(optimizer.state_dict())) == states


def test_a_state_that_the_optimizer_replaces_is_moved_again():
    class Replaces(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["sum"] = state.get("sum", 0) + p.grad
                        p.data.add_(state["sum"], alpha=-group["lr"])

    runtime = Runtime()
    (plain, expected), (model, optimizer) = twins(lambda p: Replaces(p, lr=0.1), HOW.on(runtime))
    held = on_disk(runtime)
    assert held > 0
    for each in ((plain, expected), (model, optimizer)):
        train(*each, range(2, 5))
    assert numbers(model, optimizer) == numbers(plain, expected)
    assert on_disk(runtime) == held


FUSED = {
    "AdamW": (lambda p, **how: torch.optim.AdamW(p, lr=0.05, **how), {"fused": True}),
    "Adam, foreach": (lambda p, **how: torch.optim.Adam(p, lr=0.05, **how or {"foreach": True}), {"fused": True}),
    "SGD": (lambda p, **how: torch.optim.SGD(p, lr=0.05, momentum=0.9, **how), {"fused": True}),
    "Adafactor": (lambda p, **how: torch.optim.Adafactor(p, lr=0.05), {}),
    "Lion": (lambda p, **how: OPTIMIZERS["Lion"](p), {}),
    "a count in the group": (lambda p, **how: OPTIMIZERS["a count in the group"](p), {}),
}


@pytest.mark.parametrize(("make", "on_cpu"), FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("outer", [ms.identity, ms.step_in_backward()], ids=["step", "in backward"])
def test_parameters_of_an_accelerator_step_on_the_cpu_with_its_fused_kernel(monkeypatch, make, on_cpu, outer):
    """There is none here: parameters on the CPU are taken for some that are elsewhere."""
    model, plain = network(), network()
    expected = make(plain.parameters(), **on_cpu)
    monkeypatch.setattr(on_host, "device_type", lambda _: "cuda")
    optimizer = ms.compose(outer, HOW)(make(model.parameters()))
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    for each in ((plain, expected), (model, optimizer)):
        train(*each, range(3))
    assert numbers(model, optimizer)[0] == numbers(plain, expected)[0]
    assert set(optimizer.state) <= set(model.parameters())
    after = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "count")}
    assert after == options


def test_no_room_is_an_error_before_anything_changes():
    model, original = trained(ADAMW, 1)
    before = numbers(model, original)
    with pytest.raises(ms.RuntimeUnavailable, match=r"no tier has room for .* bytes; raise the caps"):
        HOW.on(Runtime(disk_bytes=0))(original)
    assert numbers(model, original) == before


@pytest.mark.parametrize("has_stepped", [False, True])
def test_profile_counts_what_is_left_on_the_device(has_stepped):
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(8)])
    x, loss, weights = torch.ones(2, SIZE), (lambda y, _: y.square().mean()), 8 * SIZE * SIZE * 4
    for hardware in (None, "h100"):
        plain = torch.optim.AdamW(model.parameters(), fused=True)
        if has_stepped:  # it has stepped before
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            plain.step()
            plain.zero_grad()
        expected = ms.profile(model, x, optimizer=plain, loss=loss, hardware=hardware)
        optimizer = ms.compose(ms.step_in_backward(), HOW)(plain)
        found = ms.profile(model, x, optimizer=optimizer, loss=loss, hardware=hardware)
        del optimizer
        assert expected.by_category["optimizer state"] >= 2 * weights
        assert found.by_category["optimizer state"] < 100
        assert expected.peak_bytes - found.peak_bytes >= 2.6 * weights


# ---------------------------------------------------------------------------------------------------------- on disk


DISK = ms.offload_states(tier="disk")


def test_a_parameter_that_was_read_ahead_and_has_no_gradient_keeps_its_states():
    (plain, expected), (model, optimizer) = twins(ADAMW, ms.compose(ms.step_in_backward(), DISK))
    for each in ((plain, expected), (model, optimizer)):
        train(*each, [2])
        train(each[0][:3], each[1], [3])
        train(*each, [4])
    assert numbers(model, optimizer) == numbers(plain, expected)


@pytest.mark.parametrize("stream", ["in", "out"])
def test_a_disk_that_fails_is_an_error(stream):
    class Failing(HostBackend):
        fails = False

        def copy(self, source, target, direction, *, after):
            event = super().copy(source, target, direction, after=after)
            if self.fails and direction == stream:
                self.synchronize(event)
                event.error = lambda: OSError("the disk is gone")
            return event

    backend = Failing()
    model, original = trained(ADAMW, 1)
    optimizer = DISK.on(Runtime(backend=backend))(original)
    backend.fails = True
    with pytest.raises(ms.RuntimeUnavailable, match="the disk failed with OSError: the disk is gone; load the last"):
        train(model, optimizer, [1])


def test_a_step_that_must_run_for_real_is_not_profiled_with_states_on_disk():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            y = self.inner(x)
            return y if y.sum().item() > 1e30 or y.mean().item() > 1e30 else y * y.abs().max().item()

    model = Chooses()
    optimizer = DISK(ADAMW(model.parameters()))
    train(model, optimizer, [0])
    before = numbers(model, optimizer)
    with pytest.raises(ms.ConfigError, match="would change states that are on disk, which cannot be restored"):
        ms.profile(model, batch(0), optimizer=optimizer, loss=lambda y, _: y[y > y.mean()].sum())
    assert numbers(model, optimizer) == before


class _Scaled(torch.Tensor):
    """A tensor that would be made of several."""


class _KeepsOthers(torch.optim.SGD):
    """Its states are no plain tensors where a parameter is large, as those of torchao's 8-bit optimizers."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.numel() >= 4096:
                self.state[p].setdefault("codes", torch.zeros_like(p).as_subclass(_Scaled))


@pytest.mark.parametrize("tier", ["auto", "disk"])
def test_states_that_are_made_of_several_tensors_are_refused(tier):
    with pytest.raises(ms.TransformError, match=r"of this _KeepsOthers \(codes\) are made of several tensors each"):
        ms.offload_states(tier=tier)(_KeepsOthers(network().parameters(), lr=0.1))
