"""`without_side_effects`: the captured state is as before the body, in each of the three users of this context."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.regions import OperatorWatch
from memscale.regions.captures import Captures
from memscale.regions.side_effects import without_side_effects


class Restless(nn.Module):
    """A model that changes all that it can reach when it is called."""

    def __init__(self, *, reads=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(1).expand(4))  # in-place operators refuse it
        self.calls, self.seen = 0, []
        self.own = torch.Generator().manual_seed(3)
        self.reads = reads

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.mean += x.detach().mean(0)
        self.linear.weight.data.mul_(0.5)  # no version counter tells
        noise = torch.rand(4, generator=self.own) + torch.rand(4) + random.random() + float(np.random.rand())
        if self.reads and self.linear(x).sum().item() > 1e9:
            raise AssertionError
        return (self.linear(x) * self.mask + noise).sum()


def state(model):
    return [
        *(tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())),
        *(tensor._version for tensor in (*model.parameters(), *model.buffers())),
        *(parameter.grad for parameter in model.parameters()),
        model.calls,
        list(model.seen),
        model.own.get_state(),
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


def same(one, other):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


USERS = {
    "verify": lambda model, x: ms.verify(model, model, x),
    "profile, simulated": lambda model, x: ms.profile(model, x),
    "profile, measured": lambda model, x: ms.profile(
        model, x, optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    ),
}


@pytest.mark.parametrize("user", USERS)
def test_nothing_is_left_of_a_step(user):
    model, x = Restless(reads=user == "profile, measured"), torch.ones(2, 4)
    model(x).backward()
    gradient = model.linear.weight.grad
    before = state(model)
    found = USERS[user](model, x)
    assert same(state(model), before)
    assert model.linear.weight.grad is gradient
    if isinstance(found, ms.Profile):
        assert found.method == ("empirical" if model.reads else "static")
    else:
        assert found.exact  # both steps began from the same state, and the results outlive it


def test_an_exception_leaves_nothing_either():
    model, x = Restless(), torch.ones(2, 4)
    captures, before = Captures(model), state(model)
    own = [*model.parameters(), *model.buffers()]

    def step():
        with without_side_effects(captures, own, own, computes=True):
            model(x).backward()
            assert not same(state(model), before)
            raise KeyError

    with pytest.raises(KeyError):
        step()
    assert same(state(model), before)


class Force(nn.Module):
    """Asks for the gradient of its batch, and freezes what it has."""

    def __init__(self):
        super().__init__()
        self.energy, self.frozen = nn.Linear(4, 1), nn.Linear(1, 1)

    def forward(self, x):
        self.frozen.requires_grad_(False)
        return self.frozen(self.energy(x.requires_grad_()).tanh()).sum()


@pytest.mark.parametrize("static", [True, False])
def test_what_is_trained_is_as_it_was(static):
    model, x = Force(), torch.randn(3, 4)
    config = ms.Config(use_static_profiling=static)
    ms.MemoryProfiler(model, loss=lambda y, _: y, hardware="cpu", config=config).profile(x)
    assert not x.requires_grad
    assert x.grad is None
    assert all(parameter.requires_grad for parameter in model.parameters())


# ------------------------------------------------------------------------------------ what a dispatch mode of ours sees


class Seen(OperatorWatch):
    def __init__(self):
        super().__init__()
        self.names = []

    def on_call(self, func, args, kwargs):
        self.names.append(func.name())
        return func(*args, **kwargs)


def kernels(call, watch):
    with torch.profiler.profile(acc_events=True) as profiler, watch:
        call()
    return {event.name for event in profiler.events()} & {"aten::mm", "aten::bmm", "aten::addmm"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_an_operator_that_is_watched_takes_the_kernels_of_one_that_is_not(mode):
    layer, x = nn.Linear(5, 2), torch.randn(3, 4, 5).transpose(0, 1)
    with mode():
        watch = Seen()
        assert kernels(lambda: layer(x), nullcontext()) == kernels(lambda: layer(x), watch) == {"aten::mm"}
        # `linear` comes whole there.
        assert ("aten::linear" in watch.names) == (mode is torch.inference_mode)


def test_a_change_in_place_is_counted_once_in_inference_mode():
    weight = nn.Parameter(torch.ones(2))
    before = weight._version
    with torch.inference_mode(), Seen():
        weight.mul_(2)
    assert weight._version == before + 1


@pytest.mark.parametrize("call", [torch.linalg.pinv, lambda x: torch.linalg.lstsq(x, x * 2).residuals])
def test_a_kernel_that_conjugates_returns_the_numbers_of_one_that_is_not_watched(call):
    """PyTorch returns other numbers under a mode that does nothing, without an error."""
    x = torch.randn(5, 3, dtype=torch.complex128)
    with Seen():
        watched = call(x)
    assert torch.equal(watched, call(x))
