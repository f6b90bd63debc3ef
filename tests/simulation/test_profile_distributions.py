"""`profile` of models that validate what they make distributions of, as torch.distributions does by default."""

from __future__ import annotations

import pytest
from torch import distributions as d
from torch.nn import functional as F

import memscale as ms
from tests.support.profiled import ROWS, Forward, mlp, train, x
from tests.support.steps import assert_exact


@pytest.fixture(autouse=True)
def _validating():
    """As PyTorch does by default, until something is compiled in the process."""
    before = d.Distribution._validate_args
    d.Distribution.set_default_validate_args(True)
    yield
    d.Distribution.set_default_validate_args(before)


def gaussian(y):
    posterior = d.Normal(y, F.softplus(y))
    return posterior.rsample() + d.kl_divergence(posterior, d.Normal(0.0, 1.0))


def scored(y):
    chosen = d.Categorical(logits=y)
    return chosen.log_prob(chosen.sample()) * chosen.entropy()


CASES = {
    "gaussian": gaussian,
    "categorical": scored,
    "bernoulli": lambda y: d.Bernoulli(logits=y).log_prob((y > 0).float()),
    "independent": lambda y: d.Independent(d.Laplace(y, y.exp()), 1).rsample(),
    "relaxed": lambda y: d.RelaxedOneHotCategorical(1.0, logits=y).rsample(),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_valid_arguments_are_assumed_and_it_says_so(case):
    model = Forward(lambda m, y: case(m.net(y)), net=mlp())
    profile = assert_exact(train(model, x(ROWS, 48)))
    assert any("torch.distributions: valid arguments were assumed" in note for note in profile.notes), profile.notes


def test_a_model_that_decides_by_a_number_itself_is_still_measured():
    def forward(m, y):
        scale = m.net(y).exp()
        return d.Normal(y[:, :20], scale if (scale > 0).all() else 1.0).rsample()

    assert train(Forward(forward, net=mlp()), x(ROWS, 48)).profile().method == "empirical"


def test_a_step_that_draws_is_planned():
    step = train(Forward(lambda m, y: gaussian(m.net(y)), net=mlp()), x(ROWS, 48))
    assert list(ms.plan(step.model, step.batch, budget=1.0, loss=lambda y, _: y.mean(), hardware="cpu")) == []
