"""Groups of parts, stages and whole models, that compete with what is inside them."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.planning.engine import DecisionEngine
from memscale.planning.parts.candidates import AS_IT_IS, Candidate
from memscale.planning.parts.groups import groups_of
from memscale.planning.parts.parts import Part, parts_of
from memscale.planning.solving.solver import Chooser
from memscale.planning.trials.costs import Costs, Effect
from memscale.simulation import Interval, Phase
from memscale.transforms import checkpoint
from tests.planning.test_costs import KERNELS


def _loss(output, _):
    return output.square().mean()


def _thin(inner, outer):
    return nn.Sequential(nn.Linear(inner, outer), nn.Tanh(), nn.Linear(outer, outer), nn.Tanh())


class Stage(nn.Module):
    """Two blocks, and code of its own behind them."""

    def __init__(self, width, inner):
        super().__init__()
        self.one, self.two = _thin(inner, width), _thin(width, width)

    def forward(self, x):
        return torch.tanh(self.two(self.one(x)))


class Stages(nn.Module):
    """Blocks that keep little but what is between them, in stages that are not alike and in a list."""

    def __init__(self):
        super().__init__()
        self.down, self.up = Stage(8, 16), Stage(16, 24)
        self.rest = nn.ModuleList([_thin(16, 16), _thin(16, 16)])

    def forward(self, x):
        x = self.up(torch.cat([x, self.down(x)], -1))
        for each in self.rest:
            x = each(x)
        return x


def _engine(model, batch, optimizer=torch.optim.SGD):
    step = {"optimizer": optimizer(model.parameters()), "loss": _loss, "hardware": KERNELS}
    return DecisionEngine(model, batch, config=ms.Config(mode="aggressive"), **step)


@pytest.fixture(scope="module")
def row():
    """An engine for a row of blocks whose activations take most."""
    return _engine(nn.Sequential(*[_thin(16, 16) for _ in range(4)]), torch.ones(4096, 16))


def test_a_group_is_around_the_parts_that_are_inside():
    """What nobody calls is none, as a list of blocks."""
    model = Stages()
    step = _engine(model, torch.ones(64, 16)).plain_step
    parts = parts_of(model, step, tiles=True)
    inside = {
        group.path: [parts[each].path for each in group.members if each < len(parts)]
        for group in groups_of(model, step, parts)
    }
    assert inside == {
        "down": ["down.one", "down.two"],
        "up": ["up.one", "up.two"],
        "": [part.path for part in parts],
    }


def _is_what_was_thought(search, choices):
    costs = search.costs
    for chosen in choices:
        assignment = tuple(chosen.get(row, 0) for row in range(len(costs.effects)))
        step = search.prove(assignment)
        assert costs.held_bytes(assignment).max() == pytest.approx(step.profile.peak_bytes, rel=0.02)
        assert costs.seconds(assignment) == pytest.approx(step.seconds, rel=1e-3)


def test_what_a_group_holds_and_takes_is_what_was_thought(row):
    search = row.searches[0]
    ((group, _),) = search.costs.groups.items()
    _is_what_was_thought(search, [{group: number} for number in range(1, len(search.costs.candidates[group]))])


@pytest.mark.deep
def test_what_a_group_holds_beside_others_is_what_was_thought():
    """Groups in a group, and beside parts outside of them."""
    search = _engine(Stages(), torch.ones(4096, 16)).searches[0]
    costs = search.costs
    columns = {part.path: number for number, part in enumerate(costs.parts)}
    choices = [{group: number} for group in costs.groups for number in range(1, len(costs.candidates[group]))]
    extra = [{columns["up"]: 1, columns["down.one"]: 1}, {columns["up"]: 3, columns["down.two"]: 2}]
    _is_what_was_thought(search, [*choices, *extra])


def test_the_smallest_plan_cuts_the_model_as_a_whole(row):
    """Its parts keep what waits between them. And it trains to the same numbers."""
    plan = row.smallest()
    assert "" in {rule.pattern for rule in plan}
    assert "(the model)" in plan.explain()
    alone = row.steps.profile(ms.Plan(dict.fromkeys(("0", "1", "2", "3"), ms.tile(chunks=4))))
    assert plan.evidence.planned.taken_bytes < 0.9 * alone.taken_bytes
    batch = torch.randn(4096, 16)
    gradients = []
    for model in (row.model, ms.transform(row.model, plan)):
        _loss(model(batch), batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        row.model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


_INTERVALS = tuple(Interval(phase, part, False) for phase in (Phase.FORWARD, Phase.BACKWARD) for part in range(4))


def _grouped(seed):
    """Four parts, two groups of two and one around all, with what is outside."""
    random = np.random.default_rng(seed)
    none = np.zeros(len(_INTERVALS), dtype=np.int64)
    effects = []
    for _ in range(4):
        most = int(random.integers(1 << 28, 1 << 30))
        shares = (1.0, float(random.uniform(0.3, 0.7)), float(random.uniform(0.1, 0.3)))
        seconds = (0.2, *random.uniform(0.2, 0.4, 2).tolist())
        effects.append(
            tuple(
                Effect((share * most + none).astype(int), none, s, s) for share, s in zip(shares, seconds, strict=True)
            )
        )
    members = ((0, 1), (2, 3), (0, 1, 2, 3, 7))
    for inside in members:
        held = sum(effects[row][0].held_bytes for row in inside if row < 4)
        more = random.uniform(0.05, 0.4, 2)
        frees = [(-share * held).astype(np.int64) for share in random.uniform(0.6, 1.0, 2)]
        effects.append(
            (Effect(none, none, 0.0, 0.0), *(Effect(f, none, s, s) for f, s in zip(frees, more, strict=True)))
        )
    effects.append((Effect(none + (1 << 28), none, 0.1, 0.1), Effect(none, none, 0.2, 0.2)))
    parts = [Part(str(at), None, (), at) for at in range(4)]
    parts += [Part(name, None, (), name, inside) for name, inside in zip(("a", "b", ""), members, strict=True)]
    menu = (AS_IT_IS, *[Candidate((("", checkpoint()),))] * 2)
    return Costs(_INTERVALS, tuple(parts), ((menu,) * 7 + (menu[:2],)), tuple(effects), 0.5, {})


@pytest.mark.parametrize("seed", range(6))
def test_the_fastest_choice_has_no_group_with_members_that_do_something(seed):
    """Of all choices of which none is inside another that is chosen."""
    costs = _grouped(seed)
    can_be = [
        each
        for each in itertools.product(*(range(len(menu)) for menu in costs.effects))
        if not any(each[row] for row in costs.covered(each))
        and sum(bool(each[row]) for row in (4, 6)) <= 1
        and sum(bool(each[row]) for row in (5, 6)) <= 1
    ]
    most, least = costs.held_bytes(costs.as_it_is).max(), min(costs.held_bytes(each).max() for each in can_be)
    chooser = Chooser(costs, None)
    assert costs.held_bytes(chooser.smallest().assignment).max() <= 1.002 * least
    for share in (0.1, 0.4, 0.7):
        limit = least + share * (most - least)
        best = min(costs.seconds(each) for each in can_be if costs.held_bytes(each).max() <= limit)
        choice = chooser.fastest(limit)
        assert choice.assignment in can_be
        assert costs.held_bytes(choice.assignment).max() <= limit * (1 + 1e-6)
        assert costs.seconds(choice.assignment) <= 1.002 * best
        assert choice.bound <= best * (1 + 1e-6)
