"""verify: what it compares, how it counts, and that it leaves no trace."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core.errors import ConfigError, CorrectnessError
from memscale.inspection.verification import compare, verify


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.calls = 0
        self.log = []
        self.last = torch.zeros(())

    def forward(self, x, fail=False):
        self.calls += 1
        self.log.append(self.calls)
        y = self.drop(self.norm(self.conv(x)))
        self.last.add_(1)
        random.random(), np.random.rand()
        if fail:
            raise ValueError("from inside")
        return y


def batch():
    return torch.randn(2, 3, 6, 6, requires_grad=True)


def trace(model):
    return (
        [
            (name, id(p), p._version, p.grad, p.detach().clone().numpy().tobytes())
            for name, p in model.named_parameters()
        ],
        [(name, id(b), b._version, b.numpy().tobytes()) for name, b in model.named_buffers()],
        [{k: id(v) for k, v in module.__dict__.items()} for module in model.modules()],
        (model.calls, list(model.log), float(model.last), model.training),
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state()[1].tobytes(),
    )


def test_an_exact_transform_is_exact_and_everything_is_compared():
    model, x = Conv(), batch()
    found = verify(model, ms.transform(model, {"": ms.checkpoint()}), x)
    assert found.exact
    assert found.within(ulps=0)
    found.raise_if_different()
    assert [d.name for d in found.differences] == [
        "output 0",
        *(f"gradient of {name}" for name, _ in model.named_parameters()),
        "gradient of input 0",
        "buffer norm.running_mean",
        "buffer norm.running_var",
        "buffer norm.num_batches_tracked",
        "the random state",
    ]
    assert str(found) == "equal, bit for bit: 10 results of the step"


def test_neither_module_is_changed():
    model, x = Conv(), batch()
    model.conv.bias.grad = torch.ones(4)
    fit = ms.transform(model, {"conv": ms.cast()})
    before = trace(model), trace(fit)
    assert not verify(model, fit, x).exact
    assert (trace(model), trace(fit)) == before
    assert x.grad is None
    with pytest.raises(ValueError, match="from inside"):
        verify(model, fit, {"x": x, "fail": True})
    assert (trace(model), trace(fit)) == before


def test_parameters_that_a_forward_changes_come_back():
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1))
    before = model[0].weight.detach().clone(), model[0].weight._version
    verify(model, copy.deepcopy(model), torch.arange(4))
    assert torch.equal(model[0].weight, before[0])
    assert model[0].weight._version == before[1]


class Wrong(nn.Linear):
    """A linear module with one thing wrong."""

    what = ""

    def forward(self, x):
        if self.what == "draw":
            torch.rand(1)
        if self.what == "output":
            return super().forward(x) + 1
        if self.what == "gradient":
            return nn.functional.linear(x, self.weight, self.bias.detach())
        if self.what == "dtype":
            return super().forward(x).double()
        if self.what == "more":
            return super().forward(x), x
        if self.what == "nan":
            return super().forward(x) * torch.tensor([math.nan, 1.0])
        return super().forward(x)


@pytest.mark.parametrize(
    ("what", "worst", "message"),
    [
        ("draw", "the random state", "other random numbers were drawn"),
        ("output", "output 0", "1 at most"),
        ("gradient", "gradient of bias", "only the model has one"),
        ("dtype", "output 0", r"float32\[3, 2\] became float64\[3, 2\]"),
        ("more", "output 1", "only the transformed module has one"),
        ("nan", "output 0", "inf at most"),
    ],
)
def test_each_kind_of_difference_is_found_and_named(what, worst, message):
    model = nn.Linear(4, 2)
    other = Wrong(4, 2)
    other.load_state_dict(model.state_dict())
    other.what = what
    found = verify(model, other, torch.randn(3, 4))
    assert worst in [difference.name for difference in found.different]
    with pytest.raises(CorrectnessError, match=f"differ from the model's: .*{message}"):
        found.raise_if_different()
    assert f"{len(found.different)} of {len(found.differences)} results" in str(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ulps_are_counted_exactly(dtype):
    one = torch.tensor([1.0, -2.0, 0.0, math.inf, math.nan], dtype=dtype)
    up = torch.nextafter(one, torch.full_like(one, math.inf)) if dtype.itemsize >= 4 else one.clone()
    if dtype.itemsize < 4:
        up = (one.view(torch.int16) + torch.tensor([1, -1, 1, 0, 0], dtype=torch.int16)).view(dtype)
    (difference,) = compare({"x": one}, {"x": up}).differences
    eps = torch.finfo(dtype).eps
    assert (difference.max_ulps, difference.bitwise, difference.max_abs) == (1, False, eps)
    assert difference.max_ulps_of_largest == 0.5  # a step below -2 is half of one beyond
    assert compare({"x": one}, {"x": up}).within(ulps=1)
    assert not compare({"x": one}, {"x": up}).within(ulps=0.5)
    assert compare({"x": one}, {"x": up}).within(ulps=0.5, of="largest")
    compare({"x": one}, {"x": up}).raise_if_different(ulps=1)


def test_numbers_on_both_sides_of_zero_and_zeros_of_both_signs():
    (zeros,) = compare({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])}).differences
    assert (zeros.bitwise, zeros.max_ulps, zeros.max_abs) == (False, 0, 0)
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert compare({"x": tiny}, {"x": -tiny}).differences[0].max_ulps == 2
    assert compare({"x": torch.tensor([math.nan])}, {"x": torch.tensor([math.nan])}).exact
    assert compare({"x": torch.tensor([1 + 1j])}, {"x": torch.tensor([1 + 2j])}).differences[0].max_abs == 1
    assert compare({"x": torch.tensor([3, 4])}, {"x": torch.tensor([3, 9])}).differences[0].max_abs == 5
    assert compare({"x": None}, {"x": None}).exact


def test_the_report_has_the_worst_first():
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0]), "c": torch.tensor([1.0])}
    other = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0 + 2**-22]), "c": torch.tensor([2.0])}
    found = compare(one, other)
    assert [d.name for d in found.different] == ["c", "b"]
    assert str(found).splitlines() == [
        "DIFFERENT: c, relative difference 1 (rounding explains 5e-05 in float32); 2 of 3 results differ",
        "differs  max abs   max ulps  ulps of largest",
        "c        1         8.39e+06  8.39e+06",
        "b        2.38e-07  2         2",
    ]
    many = compare({str(n): torch.zeros(1) for n in range(10)}, {str(n): torch.ones(1) for n in range(10)})
    assert str(many).endswith("... and 2 more")


class WithLoss(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = scale

    def forward(self, x, target=None):
        y = x * self.weight
        return {"loss": (y - target).square().mean() * self.scale, "y": y}


def test_losses_of_each_convention():
    model, x = WithLoss(), torch.randn(2, 3)
    given = {"x": x, "target": torch.zeros(2, 3)}
    assert not verify(model, WithLoss(scale=2.0), given).exact  # its own loss
    own = verify(model, WithLoss(scale=2.0), given, loss=lambda output, batch: (output["y"] * batch["x"]).sum())
    assert [d.name for d in own.different] == ["output 0"]
    assert "the loss" in [d.name for d in own.differences]
    assert verify(model, copy.deepcopy(model), (x, torch.zeros(2, 3))).exact


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify(torch.tanh, nn.Linear(1, 1), torch.ones(1)), r"verify\(model=...\) takes a torch.nn.Module"),
        (lambda: verify(nn.Linear(1, 1), None, torch.ones(1)), r"verify\(transformed=...\).*NoneType"),
        (lambda: verify(nn.Linear(1, 1), nn.Linear(1, 1), 3), "a batch is a tensor.*got int"),
        (
            lambda: verify(nn.Linear(1, 1), nn.Linear(1, 1), torch.ones(2, 1), loss=lambda output, batch: output),
            r"one element, got a tensor of shape \[2, 1\]",
        ),
        (
            lambda: verify(nn.Linear(1, 1), nn.Linear(1, 1), torch.ones(2, 1), loss=lambda output, batch: 1.0),
            "one element, got float",
        ),
        (lambda: compare({}, {}).within(ulps=1, of="all"), "'element' or 'largest', got 'all'"),
    ],
)
def test_verify_refuses_what_it_cannot_compare(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.cuda
@pytest.mark.values
def test_on_a_gpu_the_random_state_comes_back():
    model = Conv().cuda()
    fit = ms.transform(model, {"": ms.checkpoint()})
    before = torch.cuda.get_rng_state()
    assert verify(model, fit, batch().cuda()).exact
    assert torch.equal(torch.cuda.get_rng_state(), before)


class InHalves(nn.Linear):
    """The same sums in another order."""

    def forward(self, x):
        half = self.in_features // 2
        return x[..., :half] @ self.weight[:, :half].T + (x[..., half:] @ self.weight[:, half:].T + self.bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_verdict_tells_rounding_from_another_result(dtype):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
    rows = torch.randn(64, 32).to(dtype)
    halved = copy.deepcopy(mlp)
    halved[0].__class__ = halved[2].__class__ = InHalves
    found = verify(mlp, halved, rows)
    assert found.rounds_only
    assert found.verdict.startswith("rounding only: worst relative difference ")
    changed = copy.deepcopy(mlp)
    with torch.no_grad():
        changed[0].weight[0, 0] += 2
    found = verify(mlp, changed, rows)
    assert not found.rounds_only
    assert found.verdict.startswith("DIFFERENT: ")
    assert str(found).splitlines()[0] == found.verdict


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference():
    one = {"gradient of weight": torch.ones(3), "gradient of key.bias": torch.tensor([3e-9])}
    other = {"gradient of weight": torch.ones(3), "gradient of key.bias": torch.tensor([-2e-9])}
    assert compare(one, other).rounds_only
    lost = {"gradient of weight": torch.ones(3), "gradient of key.bias": torch.tensor([1e-3])}
    assert not compare(one, lost).rounds_only


@pytest.mark.parametrize("name", ["the random state", "buffer count"])
def test_no_rounding_explains_another_random_state_or_count(name):
    found = compare({name: torch.tensor([1], dtype=torch.uint8)}, {name: torch.tensor([2], dtype=torch.uint8)})
    assert found.verdict.startswith(f"DIFFERENT: {name}, ")
