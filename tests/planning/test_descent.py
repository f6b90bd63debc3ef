"""The smallest plans: compositions that a hand writes, with two transforms on a part and one on its children."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from tests.planning.test_derivatives import Field, _loss
from tests.planning.test_plan import CPU
from tests.support.models import TransformerBlock

ROUNDS = ms.Config(mode="aggressive")  # rows may be cut


def square(output, _):
    return output.square().mean()


STEP = {"loss": square, "hardware": CPU}


class Towers(nn.Module):
    """Two towers, of which all pairs of rows meet: the whole model cannot be cut into rows, the towers can."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (TransformerBlock(16, dropout=0.0) for _ in "ab")

    def forward(self, x, y):
        return F.normalize(self.one(x).mean(1), dim=-1) @ F.normalize(self.other(y).mean(1), dim=-1).T


class Queries(nn.Module):
    """Learned queries, as many for each row, that attend to the row."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Parameter(torch.randn(4, 16)), nn.Linear(16, 16)
        self.blocks = nn.ModuleList([TransformerBlock(16, dropout=0.0) for _ in range(2)])

    def forward(self, x):
        queries, keys = self.queries.expand(len(x), -1, -1), self.keys(x)
        found = (queries @ keys.transpose(1, 2)).softmax(-1) @ keys
        for block in self.blocks:
            found = block(found)
        return found


def blocks():
    return nn.Sequential(TransformerBlock(16, dropout=0.0))


again = ms.checkpoint()
CASES = {
    "towers": (
        Towers,
        (torch.ones(4, 64, 16), torch.ones(4, 64, 16)),
        {"one": ms.tile(chunks=4), "other": ms.tile(chunks=4)},
    ),
    "queries": (Queries, (torch.ones(8, 256, 16),), {"": ms.tile(chunks=8)}),
    "evaluated norms": (
        lambda: nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in "abc"]).eval(),
        (torch.ones(8, 3, 64, 64),),
        {"": ms.tile(chunks=8)},
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_plan_takes_as_little_as_one_by_hand(name):
    make, batch, rules = CASES[name]
    torch.manual_seed(0)
    model = make()
    is_as_small_as_by_hand(ms.DecisionEngine(model, batch, config=ROUNDS, **STEP), model, batch, rules)


def is_as_small_as_by_hand(engine, model, batch, rules):
    plan = engine.smallest()
    hand = ms.profile(model, batch, plan=rules, **STEP)
    assert plan.evidence.planned.taken_bytes <= 1.001 * hand.taken_bytes  # one is 768 bytes of 2.4 MB above
    assert ms.profile(model, batch, plan=plan, **STEP).taken_bytes == plan.evidence.planned.taken_bytes
    fit = ms.transform(model, plan)
    for each in (model, fit):
        each.zero_grad()
        square(each(*batch), batch).backward()
    found, expected = ([parameter.grad for parameter in each.parameters()] for each in (fit, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_smallest_exact_plan_of_a_potential_takes_no_more_than_checkpoints_by_hand():
    """Of sums of costs, policies and cuts were the smallest, for a twentieth more than a checkpoint of each block."""
    torch.manual_seed(0)
    model, x = Field(3), torch.randn(1024, 3)
    step = {"loss": _loss, "hardware": "cpu"}
    plan = ms.DecisionEngine(model, x, **step).smallest()
    hand = ms.profile(model, x, plan={"blocks.*": again}, **step)
    assert plan.evidence.planned.taken_bytes <= hand.taken_bytes
    assert all(rule.transform.numbers == "exact" for rule in plan)


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    return ms.DecisionEngine(blocks(), torch.ones(4, 64, 16), config=ROUNDS, **STEP)


# Pieces of two rows were the smallest: of four rows there was no plan with less than half a batch at once.
@pytest.mark.parametrize("inside", [{}, {"*": again}], ids=["rows", "rows around checkpoints"])
def test_rows_of_the_whole_model_are_no_smaller_by_hand(engine, inside):
    is_as_small_as_by_hand(engine, engine.model, (torch.ones(4, 64, 16),), {"": ms.tile(chunks=4), **inside})


def test_budgets_between_steps_of_a_descent_are_kept_and_more_is_never_slower(engine):
    least, most = engine.smallest().evidence.planned.taken_bytes, engine.plain.taken_bytes
    limits = [int(least * 1.002 + (most - least) * at / 6) for at in range(5)]
    plans = [engine.plan(limit).evidence.planned for limit in limits]
    assert all(each.taken_bytes <= limit for each, limit in zip(plans, limits, strict=True))
    times = [each.step_seconds for each in plans]
    assert times == sorted(times, reverse=True)


def test_decisions_of_a_descent_are_explained(engine):
    """A plan of the whole model in rows has one decision: rules inside are part of it."""
    plan = engine.smallest()
    (decision,) = plan.evidence.decisions
    assert decision.path == ""
    assert decision.chosen.startswith("tile(chunks=")
    assert decision.kept_bytes < decision.kept_bytes_before
    assert "(the model)" in plan.explain()
