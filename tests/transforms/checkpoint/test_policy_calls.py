"""Which calls of a recompute a policy's saved results stand in for, where run and recompute make other calls."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from memscale import checkpoint, compose, offload, policies
from tests.support.checks import bits
from tests.support.coverings import taking_turns

DOTS = checkpoint(policy=policies.dots_saveable)
NAMES = checkpoint(policy=policies.save_any_names_but_these())


@dataclasses.dataclass(frozen=True, repr=False)
class Everything(policies.Policy):
    spelling: ClassVar[str] = "Everything"
    sees_labels: ClassVar[bool] = False

    def verdict(self, site: policies.Site) -> policies.Verdict:
        return policies.Save()


@dataclasses.dataclass(frozen=True, repr=False)
class Labelled(Everything):
    spelling: ClassVar[str] = "Labelled"
    sees_labels: ClassVar[bool] = True


MOVED = policies.save_and_offload_only_these_names(names_which_can_be_offloaded=["kept"], tier="disk")
SINGLE = {
    "dots": DOTS,
    "projections": checkpoint(policy=policies.dots_with_no_batch_dims_saveable),
    "names": NAMES,
    "moved": checkpoint(policy=MOVED),
    "both": checkpoint(policy=policies.save_from_both_policies(policies.dots_saveable, MOVED)),
    "everything": checkpoint(policy=Everything()),
    "everything, labels": checkpoint(policy=Labelled()),
}
TRANSFORMS = SINGLE | {
    "checkpoint, dots": compose(checkpoint(), DOTS),
    "dots, checkpoint": compose(DOTS, checkpoint()),
    "dots, dots": compose(DOTS, DOTS),
    "names, dots": compose(NAMES, DOTS),
    "checkpoint, names": compose(checkpoint(), NAMES),
    "offload, dots": compose(offload(min_bytes=0, tier="disk"), DOTS),
}


@functools.lru_cache
def frequencies(count: int) -> torch.Tensor:
    return 2.0 ** torch.arange(count)


@functools.lru_cache
def product(count: int) -> torch.Tensor:
    """Of the operator and the shapes of a layer without a bias."""
    square = torch.arange(float(count**2)).view(count, count) / count**2
    return square @ square


@functools.lru_cache(maxsize=1)
def sine(count: int) -> torch.Tensor:
    return torch.arange(float(count)).sin()


CACHES = (frequencies, product, sine)


def kept(x: torch.Tensor) -> torch.Tensor:
    return ms.name(x, "kept")


class Field(nn.Module):
    """A table that the first call makes, and five layers that are alike."""

    def __init__(self, table: Any = frequencies) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x * self.table(8) / 128)
        for layer in self.layers:
            h = torch.tanh(kept(layer(h))).sin()
        return h


class Attention(nn.Module):
    """Products of several kinds, the first of which fills a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = product(8) + frequencies(8) / 64
        q, k, v = kept(self.q(x)), self.k(x), kept(self.v(x))
        scores = kept((q @ k.mT) + bias).softmax(-1)
        return (x + self.out(kept(scores @ v))).sin()


class Alternates(nn.Module):
    """A cache of one entry, which the recompute finds with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = kept((x * sine(8)).sin())
        h = kept(self.layer(h)).sin() + sine(64)[:8]
        return kept(h * sine(8)).sin().tanh()


class Detached(nn.Module):
    """A table that is made of a weight, once for all."""

    tables: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.tables:
            with torch.no_grad():
                self.tables[0] = kept(self.first.weight @ self.second.weight)
        h = kept(self.first(x)).tanh() + kept(self.second(x)).tanh()
        return kept((h @ self.tables[0]).tanh() @ self.second.weight).sin()


PROGRAMS = {
    "field": Field,
    "field of products": lambda: Field(lambda count: product(count).sum(0)),
    "attention": Attention,
    "one entry": Alternates,
}


def clear() -> None:
    Detached.tables.clear()
    for cache in CACHES:
        cache.cache_clear()


def gradients(run: Any, module: nn.Module, between: Any = lambda: None) -> bytes:
    x = torch.linspace(-1, 1, 192).view(3, 8, 8).requires_grad_()
    y = run(x)
    between()
    return bits([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])


@taking_turns(program=PROGRAMS, how=TRANSFORMS)
def test_a_cache_that_the_run_fills_shifts_no_result(program, how):
    """A product of one layer stood for that of the next, in silence; or a recompute was said to differ."""
    torch.manual_seed(0)
    module = program()
    fit = ms.transform(module, {"": how})
    clear()
    expected = gradients(module, module)
    clear()
    assert [gradients(fit, module) for _ in range(3)] == 3 * [expected]


@taking_turns(program={**PROGRAMS, "of a weight": Detached}, how=SINGLE)
def test_calls_that_only_the_recompute_makes_shift_no_result(program, how):
    torch.manual_seed(0)
    module = program()
    fit = ms.transform(module, {"": how})
    clear()
    expected = gradients(module, module)
    for _ in range(3):
        assert gradients(fit, module, clear) == expected
        assert gradients(module, module) == expected  # with what the recompute has left in the caches


@pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_table_that_is_made_of_a_weight_is_right_or_refused(how):
    torch.manual_seed(0)
    module = Detached()
    fit = ms.transform(module, {"": how})
    clear()
    expected = gradients(module, module)
    clear()
    try:
        found = gradients(fit, module)
    except ms.CorrectnessError:  # a region inside another one saves other results in the recompute of that one
        assert how not in SINGLE.values()
    else:
        assert found == expected
    assert gradients(fit, module) == expected


class Draws(nn.Module):
    """Random numbers of both generators, and a label that comes after a later draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(8, generator=self.generator)
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        later = torch.rand(8)
        h = self.layer(kept(mask) * x).sin() * kept(later)
        return (F.dropout(h, 0.5) * noise * torch.rand(8, generator=self.generator) * torch.rand(8)).sin()


class Changes(nn.Module):
    """Changes saved results and their views in place, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = kept(self.layer(x))
        h[:, 0].mul_(2)
        h = kept(h.clone()).sin()
        a, b = kept(self.layer(h)).chunk(2, -1)
        values, indices = (kept(a) * b.exp()).sort(-1)
        kept(values).detach().view(-1).add_(0)
        both = torch.cat([kept(values).sin(), indices.to(x.dtype)], -1).add_(1).relu_()
        total, weights = torch.max(both.sin(), 1)
        return both.sin() * total[:, None] + kept(torch.mm(both[0], self.layer.weight)).sin() * weights.sum()


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = kept(self.norm(kept(self.layer(x))))
        self.mean.lerp_(kept(h.detach().mean((0, 1))), 0.1)
        return (h * self.mean * self.norm.running_mean).sin()


@pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("program", [Draws, Changes, Buffers])
def test_what_saved_operators_draw_and_change(program, how):
    found = []
    for transform in (ms.identity, how):
        torch.manual_seed(0)
        module = program()
        fit = ms.transform(module, {"": transform})
        found.append([gradients(fit, module) for _ in range(3)])
        found[-1].append(bits([*module.buffers(), torch.rand(1)]))
    assert found[0] == found[1]


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)


def _bias_in_place(x, weight, bias):
    # Without a mode `linear` adds its bias in place, to an unsafe view of the product.
    return F.linear(x.transpose(0, 1), weight, bias).sin().cos()


def _gates_in_place(x, weight, bias):
    first, second = F.linear(x, weight, bias).unsafe_chunk(2, -1)
    return first.sigmoid_() * second.tanh_()


def _sometimes(x, weight, bias):
    y = x @ weight
    return (y.mul_(2) if _sometimes.now else y).sin().cos() + bias


class _Squared(torch.autograd.Function):
    """Squares its argument in place without an operator that a mode sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        numbers = x.detach().numpy()
        numbers *= numbers
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def _by_numpy(x, weight, bias):
    return _Squared.apply(x @ weight).sin() * bias


@pytest.mark.parametrize("fn", [_bias_in_place, _gates_in_place, _sometimes, _by_numpy])
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


def test_what_a_region_in_another_keeps_is_the_same_in_the_recompute_of_that_one():
    """A watch that found a change in its run kept less there than the recompute did: the second step failed."""
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    found = []
    for run in (plain, *3 * [ms.transform(plain, {"": ms.compose(ms.checkpoint(), DOTS)})]):
        x = torch.linspace(-1, 1, 64).view(2, 4, 8)
        found.append(bits(torch.autograd.grad(run(x, x, x)[0].sum(), list(plain.parameters()))))
    assert found[1:] == found[:1] * 3


# ----------------------------------------------------------------------------------------------- what a policy is asked


def test_operators_that_give_numbers_and_sparse_tensors() -> None:
    """Such as the one behind `item` or `one_hot`."""

    def region(x: torch.Tensor) -> torch.Tensor:
        diagonal = torch.sparse_coo_tensor(torch.arange(64).expand(2, -1), x.sin(), (64, 64), check_invariants=True)
        return torch.sparse.mm(diagonal, (x * x.detach().sum().item())[:, None]).exp()

    x = torch.linspace(0, 1, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(ms.checkpoint(policy=Everything())(region)(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(region(x).sum(), x)[0])


class ReadsStatistics(torch.nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (ms.name(super().forward(x), "kept") * self.running_mean + self.running_var).tanh()


@pytest.mark.parametrize("policy", [Everything(), policies.save_only_these_names("kept")], ids=str)
def test_statistics_that_a_kept_operator_moves_are_moved_in_the_recompute(policy: policies.Policy) -> None:
    x = torch.linspace(0, 1, 64).reshape(8, 8).square().requires_grad_()
    (expected,) = torch.autograd.grad(ReadsStatistics(8)(x).sum(), x)
    norm = ReadsStatistics(8)
    assert torch.equal(torch.autograd.grad(ms.checkpoint(policy=policy)(norm)(x).sum(), x)[0], expected)
    assert norm.num_batches_tracked == 1


# --------------------------------------------------------------------------------------------------- attention_saveable

ROWS, HEADS, TOKENS, WIDTH = 2, 2, 16, 8


def attend(x, weight):
    q, k, v = (x @ weight).chunk(3, -1)
    return torch.tanh(F.scaled_dot_product_attention(q, k, v))


def _step(fn):
    torch.manual_seed(0)
    x = torch.randn(ROWS, HEADS, TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, 3 * WIDTH, requires_grad=True)
    kept = sum(each.nbytes for each in ms.saved_residuals(fn, x, weight) if each.source == "intermediate")
    with FlopCounterMode(display=False) as counter:
        out = fn(x, weight)
        out.sum().backward()
    return kept, counter.get_total_flops(), (out, x.grad, weight.grad)


def test_attention_is_kept_and_its_inputs_are_computed_again():
    how = ms.checkpoint(policy=ms.policies.attention_saveable)
    _, flops, plain = _step(attend)
    kept, again, found = _step(how(attend))
    result, logsumexp = ROWS * HEADS * TOKENS * WIDTH * 4, ROWS * HEADS * TOKENS * 4
    assert kept == result + logsumexp
    assert again - flops == 2 * ROWS * HEADS * TOKENS * WIDTH * 3 * WIDTH  # the projection
    assert bits(found) == bits(plain)


def test_it_is_written_and_read_like_any_other():
    plan = ms.Plan({"*": ms.checkpoint(policy=ms.policies.attention_saveable)})
    assert ms.Plan.from_json(plan.to_json()) == plan
    assert "checkpoint(policy=policies.attention_saveable)" in plan.to_python()


def test_what_is_drawn_after_the_forward_is_not_drawn_again_after_backward():
    """Attention without dropout draws nothing: a replay set the generator to where it was, and nobody put it back."""
    torch.manual_seed(0)
    fit = ms.checkpoint(policy=ms.policies.attention_saveable)(attend)
    for _ in range(2):  # the second call is watched in another way
        out = fit(torch.randn(1, 1, 4, 8), torch.randn(8, 24, requires_grad=True))
        torch.rand(3)
        before = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
