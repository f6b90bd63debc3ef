"""Parameters that a region of ``offload(what="params")`` changes where no version counter shows it: refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits
from tests.support.layers import PARAMS, runtime_of


class MaxNorm(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.1)
        return super().forward(x)


class Momentum(nn.Module):
    """The key encoder follows the query encoder, and equals it at first: its first update changes no value."""

    def __init__(self):
        super().__init__()
        self.query, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.weight.data.copy_(self.query.weight)

    def forward(self, x):
        self.weight.data.mul_(0.5).add_(self.query.weight.data, alpha=0.5)
        return self.query(x) * (x @ self.weight)


class MomentumInTraining(Momentum):
    def forward(self, x):
        return super().forward(x) if self.training else self.query(x)


class Later(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.weight.data = torch.zeros_like(self.weight)
        return super().forward(x)


class InPlace(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.renorm_(p=2, dim=0, maxnorm=0.1)
        return super().forward(x)


def fitted(module):
    return ms.transform(nn.Sequential(module), {"*": PARAMS}, runtime=runtime_of(0))


@pytest.mark.parametrize("make", [lambda: MaxNorm(4, 4), Momentum], ids=["assigned", "changed in place"])
def test_a_change_behind_data_is_refused_and_undone(make):
    module = make()
    before = bits(module.state_dict())
    fit = fitted(module)
    with pytest.raises(ms.TransformError, match=r"changes parameter 'weight' of .* through \.data, which is lost"):
        fit(torch.ones(2, 4))
    assert bits(module.state_dict()) == before


def test_an_assignment_is_refused_in_later_calls_too():
    fit = fitted(Later(4, 4))
    for _ in range(2):
        fit(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ms.TransformError, match="parameter 'weight' of Later"):
        fit(torch.ones(2, 4))


def test_a_change_that_is_made_in_training_only_is_refused_after_a_call_in_eval_mode():
    fit = fitted(MomentumInTraining())
    with torch.no_grad():
        fit.eval()(torch.ones(2, 4))
    with pytest.raises(ms.TransformError, match="parameter 'weight' of MomentumInTraining"):
        fit.train()(torch.ones(2, 4))


def test_the_remedy_of_the_error_works():
    module, again = InPlace(4, 4), InPlace(4, 4)
    again.load_state_dict(module.state_dict())
    fit = fitted(module)
    for model in (fit, again):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert bits(module.state_dict()) == bits(again.state_dict())
    assert bits(module.weight.grad) == bits(again.weight.grad)
