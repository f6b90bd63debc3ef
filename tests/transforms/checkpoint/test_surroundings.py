"""What is process-wide around a region and differs between forward and backward: modes, flags of backends, defaults."""

import contextvars
import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from tests.support.checks import bits, seed
from tests.support.surroundings import Doubling, Symmetric, doubles_by_default


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.round(decimals=1) if func is torch.ops.aten.sin.default else result


@contextmanager
def hook_of_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 3)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS = {
    "cached parametrizations": parametrize.cached,
    "function mode": Doubling,
    "dispatch mode": Rounding,
    "default dtype": doubles_by_default,
    "hook of all modules": hook_of_all_modules,
    "default device": lambda: torch.device("cpu"),
}


def step(how, in_forward, in_backward):
    seed()
    model = nn.Linear(3, 3)
    parametrize.register_parametrization(model, "weight", Symmetric())

    def fn(x):
        scale = torch.ones(()) / 3 + torch.zeros((), dtype=torch.get_default_dtype())
        return torch.sin(model(torch.sin(model(x)))) * scale.to(x.dtype) * torch.full((), 0.1)

    x = torch.randn(4, 3, requires_grad=True)
    with in_forward():
        y = how(fn)(x).square().sum()
    with in_backward():
        y.backward()
    return bits([x.grad, *[p.grad for p in model.parameters()]])


@pytest.mark.parametrize("how", [ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)])
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_is_on_in_the_forward_only_is_on_in_the_recompute(name, how):
    assert step(how, CONTEXTS[name], nullcontext) == step(ms.identity, CONTEXTS[name], nullcontext)


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_is_on_in_the_backward_only_is_off_in_the_recompute(name):
    assert step(ms.checkpoint(), nullcontext, CONTEXTS[name]) == step(ms.identity, nullcontext, CONTEXTS[name])


def test_modes_that_watch_stay_where_they_are():
    model, x = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    region = ms.checkpoint()(lambda x: model(model(x)).sin())
    with FlopCounterMode(display=False) as forward:
        y = region(x).sum()
    counted = forward.get_total_flops()
    y.backward()
    assert forward.get_total_flops() == counted
    y = region(x).sum()
    with FlopCounterMode(display=False) as backward:
        y.backward()
    plain = model(model(x)).sin().sum()
    with FlopCounterMode(display=False) as without:
        plain.backward()
    assert backward.get_total_flops() == without.get_total_flops() + counted


def counted_gradients(how, counted_in, device):
    """Under a mode `linear` of three dimensions adds its bias by `add`, without one by `add_`."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.ModuleList([layer, nn.Linear(16, 16)]).to(device)
    x = torch.randn(2, 4, 16, device=device, requires_grad=True)
    region = how(lambda x: model[1](model[0](x).transpose(0, 1)).sin().cos())
    region(x)  # the first call is watched, by a mode
    with FlopCounterMode(display=False) if counted_in == "forward" else nullcontext():
        y = region(x).sum()
    with FlopCounterMode(display=False) if counted_in == "backward" else nullcontext():
        y.backward()
    return [x.grad.cpu(), *[parameter.grad.cpu() for parameter in model.parameters()]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.values])])
@pytest.mark.parametrize("how", [ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)], ids=repr)
@pytest.mark.parametrize("counted_in", ["forward", "backward"])
def test_a_counter_around_one_of_forward_and_backward_changes_no_number(how, counted_in, device):
    expected = counted_gradients(ms.identity, counted_in, device)
    assert bits(counted_gradients(how, counted_in, device)) == bits(expected)


def test_a_region_keeps_no_mode_that_only_watches():
    counter = FlopCounterMode(display=False)
    x = torch.ones(2, requires_grad=True)
    with counter:
        inside = weakref.ref(torch.utils._python_dispatch._get_current_dispatch_mode())
        y = ms.checkpoint()(lambda x: x.sin().cos())(x).sum()
    del counter
    gc.collect()
    assert inside() is None
    y.backward()
    assert x.grad is not None


SETTINGS = [
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cudnn, "enabled", False),
    (torch.backends.cudnn, "allow_tf32", False),
    (torch.backends.cuda.matmul, "allow_tf32", True),
    (torch.backends.mkldnn, "deterministic", True),
]


@pytest.mark.parametrize(("where", "name", "value"), SETTINGS, ids=[name for _, name, _ in SETTINGS])
def test_flags_of_backends_are_those_of_the_forward(where, name, value):
    before = getattr(where, name)

    class Look(nn.Module):
        def forward(self, x):
            Look.last = getattr(where, name)
            return x.sin().cos()

    region, x = ms.checkpoint()(Look()), torch.ones(2, requires_grad=True)
    try:
        setattr(where, name, value)
        y = region(x).sum()
        setattr(where, name, before)
        Look.last = None
        y.backward()
        assert Look.last == value
        assert getattr(where, name) == before
    finally:
        setattr(where, name, before)


def test_deterministic_algorithms_are_those_of_the_forward():
    class Look(nn.Module):
        def forward(self, x):
            Look.last = torch.are_deterministic_algorithms_enabled()
            return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    with deterministic():
        y = ms.checkpoint()(Look())(x).sum()
    y.backward()
    assert Look.last
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_hidden_tensor_that_changed_is_still_refused_under_a_mode():
    class Settings:
        scale = torch.full((3,), 2.0)

    hidden, x = Settings(), torch.ones(3, requires_grad=True)
    y = ms.checkpoint()(lambda x: (x.sin() * hidden.scale).cos())(x).sum()
    hidden.scale.mul_(2)
    with FlopCounterMode(display=False), pytest.raises(ms.CorrectnessError, match="is at version"):
        y.backward()


def test_a_change_through_numpy_is_out_of_reach():
    weight = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    y = ms.checkpoint()(lambda x: torch.sin(weight * x))(x).sum()
    np.multiply(weight.numpy(), 2, out=weight.numpy())
    y.backward()
    assert not torch.allclose(x.grad, torch.ones(3).cos()), "documented: no version counter shows it"


def test_a_context_variable_is_that_of_the_forward():
    scale = contextvars.ContextVar("scale", default=1.0)

    def step(how):
        x = torch.ones(2, requires_grad=True)
        token = scale.set(2.0)
        y = how(lambda x: torch.sin(x * scale.get()))(x).sum()
        scale.reset(token)
        y.backward()
        return bits(x.grad), scale.get()

    def twice(how):
        token = scale.set(2.0)
        found = torch.func.grad(lambda x: how(lambda x: torch.sin(x * scale.get()))(x).sum())(torch.ones(2))
        scale.reset(token)
        return bits(found)

    assert step(ms.checkpoint()) == step(ms.identity)
    assert twice(ms.checkpoint()) == twice(ms.identity)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:Dynamo:UserWarning")
@pytest.mark.parametrize(
    "how",
    [ms.checkpoint(), pytest.param(ms.offload(min_bytes=0), marks=pytest.mark.deep)],
    ids=["checkpoint", "offload"],
)
def test_a_compiled_step_runs_its_backward_with_hooks_that_stay_uncompiled(how):
    """Dynamo took versions and sizes in them for constants, and found changed what was not."""

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            torch._dynamo.graph_break()
            x = self.up(x).sin()
            print(end="")
            return self.norm(self.down(x.exp() * x.tanh()))

    def step(model, x):
        loss = model(x).square().sum()
        loss.backward()
        return loss

    torch.manual_seed(0)
    plain = nn.Sequential(Breaks(), nn.Linear(4, 4))
    fit, compiled = ms.transform(plain, {"0": how}), torch.compile(step, backend="aot_eager")
    torch._dynamo.reset()
    for rows in (4, 5):
        x, found = torch.randn(rows, 4), []
        for run, model in ((step, plain), (compiled, fit)):
            plain.zero_grad()
            found.append(bits([run(model, x), *(parameter.grad for parameter in plain.parameters())]))
        assert found[0] == found[1]


class Unsettled(nn.Module):
    """Changes an attribute and a setting, and puts them back only at its end, which a recompute does not reach."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x, changes):
        if changes:
            self.scale = 3.0
            torch.set_default_dtype(torch.float64)
        y = torch.exp(x * self.scale).sin()
        if changes:
            torch.set_default_dtype(torch.float32)
            self.scale = 1.0
        return y + 1.0


# The first run is watched; what begins in a later call is not.
@pytest.mark.parametrize("calls", [[True] * 3, [False, False, True, True]])
def test_what_a_region_puts_back_at_its_end_is_put_back_after_a_recompute_that_stops_earlier(calls):
    region = ms.transform(Unsettled(), {"": ms.checkpoint()})
    for changes in map(torch.tensor, calls):
        x = torch.full((2,), 0.5, requires_grad=True)
        y = region(x, changes)
        y.sum().backward()
        assert torch.get_default_dtype() is torch.float32
        assert region.scale == 1.0


def test_a_backward_behind_the_arguments_that_recomputes_the_region_ends_at_them_in_a_recompute():
    def through(x):
        x.square().sum().backward(retain_graph=True)
        return x.sin()

    def gradient(how):
        leaf = torch.ones(2, requires_grad=True)
        how(through)(leaf * 2).sum().backward()
        return bits([leaf.grad])

    assert gradient(ms.checkpoint()) == gradient(ms.identity)


@pytest.mark.parametrize("calls", [[True] * 3, [False, False, True, True]])
def test_a_region_that_runs_a_backward_behind_its_arguments_is_refused_in_any_call(calls):
    def through(x, runs):
        if runs:
            x.sum().backward(retain_graph=True)
        return x.sin()

    region = ms.checkpoint()(through)
    for runs in map(torch.tensor, calls):
        leaf = torch.ones(2, requires_grad=True)
        y = region(leaf * 2, runs)
        if not runs:
            y.sum().backward()
            continue
        with pytest.raises(ms.CorrectnessError, match="a backward that goes on behind its arguments"):
            y.sum().backward()


def test_a_watched_run_without_a_backward_shows_that_the_region_runs_one():
    def through(x):
        x.sum().backward(retain_graph=True)
        return x.sin()

    region = ms.checkpoint()(through)
    region(torch.ones(2, requires_grad=True) * 2)
    y = region(torch.ones(2, requires_grad=True) * 2)
    with pytest.raises(ms.CorrectnessError, match="a backward that goes on behind its arguments"):
        y.sum().backward()


@pytest.mark.parametrize("policy", [None, ms.policies.dots_saveable], ids=["all", "dots"])
def test_batched_gradients_through_dropout_are_those_of_the_plain_model(policy):
    # PyTorch refuses random operators in a backward with batched gradients, its own checkpoint included.
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh()).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    directions = torch.eye(12, dtype=torch.float64).view(12, 3, 4)

    def run(model):
        torch.manual_seed(5)
        batched = torch.autograd.grad(model(x), x, directions, is_grads_batched=True)[0]
        jacobian = torch.autograd.functional.jacobian(model, x, vectorize=True)
        return [batched, jacobian, torch.rand(3), model[1].running_mean.clone()]

    fit = ms.transform(copy.deepcopy(model), {"": ms.checkpoint(policy=policy)})
    for ours, plain in zip(run(fit), run(model), strict=True):
        assert torch.equal(ours, plain)
