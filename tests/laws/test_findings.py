"""The findings of the second attack on exactness, by number: each was a wrong number, a false error or a leak.

A short program for each, as an index; the tests of the parts go into the cases. `same` runs a program as it is and
with the transform, and wants the same numbers, or an error of memscale where there is no way to them.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from memscale.runtime import Runtime
from tests.support.checks import bits, seed
from tests.support.surroundings import Doubling, Symmetric, doubles_by_default

CHECKPOINT = ms.checkpoint()
DOTS = ms.checkpoint(policy=ms.policies.dots_saveable)
DOUBLE = ms.cast(compute=torch.float64)
PARAMS = ms.offload(what="params", tier="disk", min_bytes=0)

Check = Callable[[], None]
FINDINGS: dict[str, Check] = {}


def finding(number: int, title: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        FINDINGS[f"{number}: {title}"] = check
        return check

    return register


def outcome(run: Callable[[Any], Any], how: Any) -> Any:
    seed()
    return bits(run(how))


def same(run: Callable[[Any], Any], *, how: Any = CHECKPOINT, error: type[Exception] | None = None) -> None:
    """`run(how)` gives what `run(ms.identity)` gives, or raises `error` where it is given."""
    expected = outcome(run, ms.identity)
    if error is None:
        assert outcome(run, how) == expected
    else:
        with pytest.raises(error):
            outcome(run, how)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def gradients(loss: torch.Tensor, *holders: Any) -> list[Any]:
    loss.backward()
    tensors = [p for h in holders for p in (h.parameters() if isinstance(h, nn.Module) else [h])]
    return [tensor.grad for tensor in tensors]


# ----------------------------------------------------------------------------------------------------- the findings


def hooked(change: str) -> Callable[[Any], Any]:
    def run(how: Any) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        region, x = how(model), ones(3, 2)
        if change == "removed":
            handle = model[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        y = region(x)
        if change == "removed":
            handle.remove()
        else:
            model[0].register_forward_hook(lambda module, args, out: out * 3)
        return gradients(y.square().sum(), model, x)

    return run


@finding(1, "a hook inside a region removed before backward")
def _() -> None:
    same(hooked("removed"))


@finding(1, "a hook inside a region added before backward")
def _() -> None:
    same(hooked("added"))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, losses: list[Any], cache: dict[str, Any]) -> torch.Tensor:
        hidden = self.linear(x).tanh()
        losses.append(hidden.square().mean())
        cache["hidden"] = hidden
        return hidden


@finding(2, "cast and what a region writes into a list and a dictionary")
def _() -> None:
    model, losses, cache = Mixture(), [], {}
    x = ones(3, 2)
    y = DOUBLE(model)(x, losses, cache)
    assert len(losses) == 1
    assert set(cache) == {"hidden"}
    (y.sum() + losses[0].float() + cache["hidden"].float().sum()).backward()
    expected = torch.autograd.grad(2 * model.linear(x).tanh().sum() + model.linear(x).tanh().square().mean(), x)[0]
    torch.testing.assert_close(x.grad, expected)


class MaxNorm(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


@finding(3, "tile and a forward that assigns weight.data")
def _() -> None:
    model = MaxNorm(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ms.TransformError):
        ms.tile(chunks=2)(model)(torch.ones(4, 2))
    assert model.weight.device.type == "cpu"
    assert torch.equal(model.weight, before)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("st", torch.ones(2, 1))
        self.row = self.st[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.st.mul_(2.0)
        return torch.sin(x * self.row)


class TwoOwners(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(2), nn.Module()
        self.b.register_buffer("mean", self.a.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.a(x) * self.b.mean)


@finding(4, "a view of a buffer kept as an attribute")
def _() -> None:
    def run(how: Any) -> Any:
        model, found = Aliased(), []
        for _ in range(3):
            x = ones(1)
            found += [*gradients(how(model)(x).sum(), x), model.st.clone()]
        return found

    same(run)


@finding(4, "one buffer in two modules")
def _() -> None:
    def run(how: Any) -> Any:
        model, found = TwoOwners(), []
        region = how(model)
        for _ in range(3):
            x = torch.linspace(-1, 2, 6).reshape(3, 2).requires_grad_()
            found += [*gradients(region(x).square().sum(), x), model.a.running_mean.clone()]
        return found

    same(run)


@finding(4, "a closure over a tensor and its row")
def _() -> None:
    def run(how: Any) -> Any:
        t = torch.ones(2, 1)
        row, found = t[0], []
        region = how(lambda x: torch.sin(t.mul_(2.0).sum() * x * row))
        for _ in range(3):
            x = ones(1)
            found += [*gradients(region(x).sum(), x), t.clone()]
        return found

    same(run)


@finding(4, "a buffer that is also an argument")
def _() -> None:
    def run(how: Any) -> Any:
        model, found = nn.Module(), []
        model.register_buffer("st", torch.ones(1))
        model.forward = lambda x, same: torch.sin(model.st.mul_(2.0).sum() * x * same)
        region = how(model)
        for _ in range(3):
            x = ones(1)
            found += [*gradients(region(x, model.st).sum(), x), model.st.clone()]
        return found

    same(run)


class Momentum(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
            if self.how == "assigned":
                old.data = old.data * 0.5 + new.data * 0.5
            else:
                old.data.mul_(0.5).add_(new.data, alpha=0.5)
        return torch.sin(self.online(x)) * torch.sin(self.target(x))


def momentum(how_it_changes: str) -> Callable[[Any], Any]:
    def run(how: Any) -> Any:
        model, found = Momentum(how_it_changes), []
        fit = how(model)
        for _ in range(3):
            x = ones(4, 2)
            found += gradients(fit(x).sum(), x, model.online)
            found += [p.detach().clone() for p in model.parameters()]
        return found

    return run


def momentum_is_refused(how_it_changes: str, how: Any) -> None:
    """An error before anything is lost."""
    model = Momentum(how_it_changes)
    before = bits(list(model.parameters()))
    with pytest.raises(ms.TransformError, match=r"\.data|in place"):
        how(model)(torch.ones(4, 2))
    assert bits(list(model.parameters())) == before


@finding(5, "p.data = ... inside a checkpoint")
def _() -> None:
    same(momentum("assigned"))


@finding(5, "p.data.mul_() inside a checkpoint")
def _() -> None:
    same(momentum("in place"))


@finding(5, "p.data = ... inside a tile")
def _() -> None:
    momentum_is_refused("assigned", ms.tile(chunks=2))


@finding(5, "p.data.mul_() inside a tile")
def _() -> None:
    momentum_is_refused("in place", ms.tile(chunks=2))


@finding(5, "p.data = ... inside streamed parameters")
def _() -> None:
    momentum_is_refused("assigned", PARAMS)


@finding(5, "p.data.mul_() inside streamed parameters")
def _() -> None:
    momentum_is_refused("in place", PARAMS)


@finding(5, "p.data = ... inside a cast")
def _() -> None:
    momentum_is_refused("assigned", DOUBLE)


@finding(5, "p.data.mul_() inside a cast")
def _() -> None:
    momentum_is_refused("in place", DOUBLE)


@finding(6, "parameters unfrozen between forward and backward")
def _() -> None:
    def run(how: Any) -> Any:
        model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).requires_grad_(False), ones(3, 2)
        y = how(model)(x * 0.5).sum()
        model.requires_grad_(True)
        return gradients(y, model, x)

    same(run)


@finding(6, "parameters frozen around backward")
def _() -> None:
    def run(how: Any) -> Any:
        model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ones(3, 2)
        y = how(model)(x * 0.5).sum()
        model[0].requires_grad_(False)
        y.backward()
        model[0].requires_grad_(True)
        return [x.grad, *[p.grad for p in model.parameters()]]

    same(run)


@finding(7, "tile under torch.compile and BatchNorm in training")
def _() -> None:
    model = nn.BatchNorm1d(2)
    compiled = torch.compile(ms.transform(model, {"": ms.tile(chunks=2)}), backend="eager")
    try:
        with pytest.raises(Exception, match="tile"):
            compiled(torch.randn(4, 2))
    finally:
        torch._dynamo.reset()


@finding(9, "tile joins pieces of which one is broadcast")
def _() -> None:
    with pytest.raises((ms.TransformError, RuntimeError)):
        ms.tile(size=2)(lambda x: x @ x.T)(torch.tensor([[1.0], [2.0], [3.0]]))


@finding(9, "tile joins pieces of other dtypes")
def _() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.double() if len(x) == 1 else x

    with pytest.raises((ms.TransformError, RuntimeError)):
        ms.tile(size=2)(fn)(torch.ones(3, 2))


def around(context: Callable[[], Any]) -> Callable[[Any], Any]:
    def run(how: Any) -> Any:
        model = nn.Linear(2, 2)
        parametrize.register_parametrization(model, "weight", Symmetric())
        x = ones(3, 2)
        region = how(lambda t: torch.sin(model(model(t))).square() * torch.full((2,), 0.1))
        with context():
            y = region(x).sum()
        return gradients(y.float(), model, x)

    return run


@finding(10, "parametrize.cached() around the forward only")
def _() -> None:
    same(around(parametrize.cached))


@finding(10, "a TorchFunctionMode around the forward only")
def _() -> None:
    same(around(Doubling))


@finding(10, "another default dtype around the forward only")
def _() -> None:
    same(around(doubles_by_default))


@finding(11, "p.data = new between forward and backward")
def _() -> None:
    def run(how: Any) -> Any:
        model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ones(3, 2)
        y = how(model)(x * 0.5).sum()
        model[0].weight.data = model[0].weight.data * 2
        return gradients(y, model, x)

    same(run, error=ms.CorrectnessError)


@finding(12, "lazy 16-bit logits times a float32 tensor of one element")
def _() -> None:
    head, hidden = nn.Linear(8, 50).bfloat16(), torch.ones(4, 8, dtype=torch.bfloat16)
    for factor in (torch.tensor([1.3]), torch.tensor(1.3), torch.ones(1, 1)):
        assert (ms.tile(chunks=2)(head)(hidden) * factor).dtype == (head(hidden) * factor).dtype


@finding(13, "dots_saveable and autograd.grad inside the region")
def _() -> None:
    def run(how: Any) -> Any:
        w = torch.linspace(-1, 1, 4).reshape(2, 2).requires_grad_()

        def forces(x: torch.Tensor) -> torch.Tensor:
            energy = torch.tanh(x @ w).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return (force @ w).sin()

        x = ones(3, 2)
        return gradients(how(forces)(x * 0.5).square().sum(), w, x)

    same(run, how=DOTS)


@finding(14, "backward of one output, retained, then of the other")
def _() -> None:
    def run(how: Any) -> Any:
        x = ones(3, 2)
        a, b = how(lambda x: (torch.sin(x), torch.tanh(x).exp()))(x)
        a.sum().backward()
        b.sum().backward(retain_graph=True)
        b.sum().backward()
        return x.grad

    for how in (CHECKPOINT, DOTS):
        same(run, how=how)


def counted(during: str) -> Callable[[Any], Any]:
    """Under a mode `linear` of three dimensions adds its bias by `add`, without one by `add_`."""

    def run(how: Any) -> Any:
        model, x = nn.Linear(4, 4), ones(3, 2, 4)
        region = how(lambda x: model(x.transpose(0, 1)).sin().cos())
        region(x)  # the first call is watched, by a mode
        with FlopCounterMode(display=False) if during == "forward" else nullcontext():
            y = region(x).sum()
        with FlopCounterMode(display=False) if during == "backward" else nullcontext():
            return gradients(y, model, x)

    return run


@finding(15, "a dispatch mode in the forward only")
def _() -> None:
    for how in (CHECKPOINT, DOTS):
        same(counted("forward"), how=how)


@finding(15, "a dispatch mode in the backward only")
def _() -> None:
    for how in (CHECKPOINT, DOTS):
        same(counted("backward"), how=how)


def transformer_under_a_mode(how: Any, counted: str) -> Any:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True).cuda()
    x = torch.randn(2, 4, 16, device="cuda", requires_grad=True)
    fit = how(model)
    with FlopCounterMode(display=False) if counted == "forward" else nullcontext():
        y = fit(x).sum()
    with FlopCounterMode(display=False) if counted == "backward" else nullcontext():
        y.backward()
    return [x.grad.cpu(), *[p.grad.cpu() for p in model.parameters()]]


@pytest.mark.cuda
@pytest.mark.values
@pytest.mark.parametrize("counted", ["forward", "backward"])
def test_finding_15_a_transformer_with_a_dispatch_mode_in_the_forward_only(counted):
    assert bits(transformer_under_a_mode(CHECKPOINT, counted)) == bits(transformer_under_a_mode(ms.identity, counted))


@pytest.mark.cuda
@pytest.mark.parametrize("counted", ["forward", "backward"])
def test_finding_15_is_no_error_on_a_device(counted):
    grads = transformer_under_a_mode(CHECKPOINT, counted)
    assert [g.shape for g in grads] == [g.shape for g in transformer_under_a_mode(ms.identity, counted)]


def freed(make: Callable[[], Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        model = make()
        watched = [weakref.ref(p) for p in model.parameters()]
        del model
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


@finding(16, "a transformed model is freed by del")
def _() -> None:
    def make() -> nn.Module:
        fit = ms.transform(layers(), {"*": CHECKPOINT, "": ms.offload()})
        fit(torch.ones(1, 2)).sum().backward()
        return fit

    freed(make)


@finding(17, "a region's forward is a bound method with a signature")
def _() -> None:
    fit = ms.transform(Mixture(), {"": CHECKPOINT})
    assert inspect.ismethod(fit.forward)
    assert fit.forward.__self__ is fit
    assert list(inspect.signature(fit.forward).parameters) == ["x", "losses", "cache"]


@finding(18, "offload() under torch.func, inside a checkpoint")
def _() -> None:
    x = torch.linspace(-1, 1, 6).reshape(3, 2)
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0), disk_bytes=1 << 20)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.sin((x * 2).exp()).square()

    def loss(layer: Any) -> Any:
        return lambda x: layer(layer(x * 1) * 1).sum()

    fit = ms.compose(CHECKPOINT, ms.offload(min_bytes=0).on(runtime))(layer)
    for of in (torch.func.grad, lambda g: torch.func.vmap(torch.func.grad(g))):
        assert bits(of(loss(fit))(x)) == bits(of(loss(layer))(x))
    assert not runtime.stats()


def test_what_an_operator_returns_beside_its_output_goes_with_it():
    """A policy's recorder kept it until another output came to the same address: a step held other bytes each time."""
    gone = []

    def region(x):
        out, mean, _ = torch.native_layer_norm(x, (64,), None, None, 1e-5)
        extra = weakref.ref(mean.untyped_storage())
        del mean, _
        out = out * 2
        gone.append(extra() is None)
        return out

    DOTS(region)(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert gone[0]


@pytest.mark.parametrize("check", FINDINGS.values(), ids=FINDINGS)
def test_finding(check):
    check()
