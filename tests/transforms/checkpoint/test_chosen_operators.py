"""Policies of contractions, from the second call of a region on: nothing watches it but for what they keep."""

from __future__ import annotations

import io
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from memscale.regions import ChosenWatch, can_choose
from tests.support.checks import bits

DOTS = ms.checkpoint(policy=ms.policies.dots_saveable)
MM = torch.ops.aten.mm.default


class Seen(ChosenWatch):
    def __init__(self):
        assert can_choose({MM})
        super().__init__({MM})
        self.calls = 0

    def after(self, op, result):
        self.calls += 1


class Modes(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Depths:
    seen: ClassVar[list[int]] = []  # of a class, which no recompute puts back


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)


def test_a_region_runs_without_a_dispatch_mode_and_repeats_no_product(weights):
    weight, _ = weights
    Depths.seen.clear()

    def region(x):
        Depths.seen.append(torch._C._len_torch_dispatch_stack())
        return (x @ weight).sin() @ weight

    fit, x = DOTS(region), torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        loss = fit(x).sum()
        with FlopCounterMode(display=False) as counted:
            loss.backward()
    assert Depths.seen[2::2] == [0, 0]  # a first run is watched, and a counter is a mode
    with FlopCounterMode(display=False) as plain:
        region(x).sum().backward()
    assert 2 * counted.get_total_flops() == 2 * plain.get_total_flops() - 2 * 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("outer", [False, True], ids=["inside", "around"])
def test_each_call_is_seen_once_under_modes(outer, weights):
    weight, _ = weights
    watch, modes = Seen(), Modes() if outer else FlopCounterMode(display=False)
    for entered in [modes, watch] if outer else [watch, modes]:
        entered.__enter__()
    try:
        F.linear(weight, weight)
    finally:
        for entered in [watch, modes] if outer else [modes, watch]:
            entered.__exit__(None, None, None)
    assert watch.calls == 1
    assert modes.calls == 2 if outer else modes.get_total_flops() == 2 * 8**3
    weight @ weight
    assert watch.calls == 1


def test_what_another_mode_runs_for_itself_is_no_call_of_the_region(weights):
    with Seen() as watch, FakeTensorMode(allow_non_fake_inputs=True):
        torch.empty(3, 3) @ torch.empty(3, 3)
    assert watch.calls == 0


def _bias_in_place(x, weight, bias):
    # Without a mode `linear` adds its bias in place, to an unsafe view of the product.
    return F.linear(x.transpose(0, 1), weight, bias).sin().cos()


def _gates_in_place(x, weight, bias):
    first, second = F.linear(x, weight, bias).unsafe_chunk(2, -1)
    return first.sigmoid_() * second.tanh_()


def _sometimes(x, weight, bias):
    y = x @ weight
    return (y.mul_(2) if _sometimes.now else y).sin().cos() + bias


@pytest.mark.parametrize("fn", [_bias_in_place, _gates_in_place, _sometimes])
def test_what_is_changed_in_place_is_computed_again(fn, weights):
    fit, found = DOTS(fn), []
    for now in (False, True, False, True):
        _sometimes.now = now
        for run in (fn, fit):
            x = torch.linspace(-1, 1, 96).view(3, 4, 8).requires_grad_()
            found.append(bits(torch.autograd.grad(run(x, *weights).sum(), (x, *weights))))
    assert found[::2] == found[1::2]


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8)], ids=["mm", "unsafe view"])
def test_a_result_that_its_caller_changed_is_computed_again(shape, weights):
    """It was replayed as it had become, in silence."""
    weight, _ = weights
    fit = DOTS(lambda x: (y := x @ weight, (y + 1).sin()))
    x = torch.randn(shape, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ weight + 1).sin().sum(), x)
    for _ in range(2):
        y, z = fit(x)
        with torch.no_grad():
            y.add_(1)
        assert torch.equal(torch.autograd.grad(z.sum(), x)[0], expected)


def test_dropout_of_attention_is_the_same_in_backward():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            return F.dropout(self.attention(x, x, x, need_weights=False)[0], 0.5)

    torch.manual_seed(0)
    block = Block()
    fit = ms.transform(block, {"": DOTS})
    for _ in range(3):
        found = []
        for module in (block, fit):
            x = torch.linspace(-1, 1, 64).view(2, 4, 8).requires_grad_()
            torch.manual_seed(1)
            found.append(bits([*torch.autograd.grad(module(x).sum(), [x, *module.parameters()]), torch.rand(1)]))
        assert found[0] == found[1]


def test_what_a_region_in_another_keeps_is_the_same_in_the_recompute_of_that_one():
    """A watch that found a change in its run kept less there than the recompute did: the second step failed."""
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    found = []
    for run in (plain, *3 * [ms.transform(plain, {"": ms.compose(ms.checkpoint(), DOTS)})]):
        x = torch.linspace(-1, 1, 64).view(2, 4, 8)
        found.append(bits(torch.autograd.grad(run(x, x, x)[0].sum(), list(plain.parameters()))))
    assert found[1:] == found[:1] * 3


class Biased(nn.Module):
    """Attention that keeps its scores where a policy keeps products, and adds its bias to them in place."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 2, 64, 64))

    def forward(self, x):
        RUNS.write(".")
        q = x.unflatten(-1, (2, 32)).transpose(1, 2)
        with sdpa_kernel(SDPBackend.MATH):
            return x + F.scaled_dot_product_attention(q, q, q, self.bias).transpose(1, 2).flatten(2)


RUNS = io.StringIO()  # which a simulation does not put back


@pytest.mark.parametrize(("policy", "steps"), [("nothing_saveable", 2), ("dots_saveable", 3)])
def test_a_profile_goes_on_until_its_regions_go_the_way_of_later_steps(policy, steps):
    """The first run sees a sum out of place, the second one loses what it kept, and the third one is watched again."""
    plan = {"0": ms.checkpoint(policy=getattr(ms.policies, policy))}
    began = RUNS.tell()
    ms.profile(nn.Sequential(Biased()), torch.ones(4, 64, 64), loss=lambda y, _: y.sum(), plan=plan, hardware="h100")
    assert RUNS.tell() - began == 2 * steps  # and as many recomputes
