"""Plans of models whose forward differentiates: potentials that are trained on energies and forces, and their kind."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.measured import training_roles
from tests.support.checks import bits


class Field(nn.Module):
    """A value and its derivative by the input, of which both are trained on."""

    def __init__(self, depth):
        super().__init__()
        self.inp, self.out = nn.Linear(3, 64), nn.Linear(64, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64), nn.SiLU()) for _ in range(depth)
        )

    def energies(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energies(x).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -gradient


class Penalised(Field):
    """A critic with a penalty of its gradient."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        scores = self.energies(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean(), (gradient.norm(dim=1) - 1).square()


class Equation(Field):
    """The residual of a differential equation of second order."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.energies(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return u.mean(), first[:, 1:2] - second[:, :1] + u


def _loss(output, _):
    value, derivative = output
    return value.square() + derivative.square().mean()


def _gradients(model, x):
    model.zero_grad()
    _loss(model(x), x).backward()
    return [parameter.grad for parameter in model.parameters()]


def _peak(fn, model, x):
    """Of a step on the allocator."""
    model.zero_grad()
    return ms.measure(lambda: _loss(fn(x), x).backward(), roles=training_roles(model, None, x)).peak_bytes


@pytest.mark.deep  # by default the smallest plan of a potential: tests/planning/test_descent.py
@pytest.mark.parametrize(
    ("kind", "depth", "share", "exact"), [(Field, 4, 0.8, False), (Field, 4, 0.85, True), (Penalised, 4, 0.85, True)]
)
def test_a_plan_fits_and_has_the_gradients_of_the_model(kind, depth, share, exact):
    torch.manual_seed(0)
    model, x = kind(depth), torch.randn(1024, 3)
    limit = int(share * ms.profile(model, x, loss=_loss, hardware="cpu").taken_bytes)
    plan = ms.plan(model, x, limit, loss=_loss, hardware="cpu", exact=exact)
    assert plan.evidence.planned.taken_bytes <= limit
    fit = ms.transform(model, plan)
    assert _peak(fit, model, x) <= limit
    found, expected = _gradients(fit, x), _gradients(model, x)
    if exact:
        assert bits(found) == bits(expected)
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.deep) for kind in (Field, Penalised)), Equation]
)
def test_what_the_backward_inside_keeps_of_a_region_is_recomputed_too(kind):
    """Of activations nothing is left then, in the simulation and on the allocator, at the same gradients."""
    torch.manual_seed(0)
    model, x = kind(4), torch.randn(1024, 3)
    fit = ms.transform(model, {"blocks.*": ms.checkpoint()})
    assert bits(_gradients(fit, x)) == bits(_gradients(model, x))
    plain, less = (ms.profile(each, x, loss=_loss, hardware="cpu") for each in (model, fit))
    activations = 4 * 1024 * (64 + 4 * 256) * 4 // 2
    assert plain.peak_bytes - less.peak_bytes > activations // 2
    assert _peak(model, model, x) - _peak(fit, model, x) > activations // 2


@pytest.mark.parametrize("change", [lambda h: h.mul_(2), lambda h: h.copy_(h.flip(0))])
def test_a_change_in_place_behind_the_backward_inside_is_an_error(change):
    """Autograd's own check does not see what comes from hooks."""
    torch.manual_seed(0)
    block = ms.checkpoint()(nn.Sequential(nn.Linear(4, 4), nn.SiLU()))
    x = torch.randn(3, 4, requires_grad=True)
    y = block(x)
    outside = torch.ones_like(y)
    (first,) = torch.autograd.grad(y, x, outside, create_graph=True)
    with torch.no_grad():
        change(outside)
    with pytest.raises((RuntimeError, ms.CorrectnessError), match=r"in.?place|changed"):
        first.square().sum().backward()
