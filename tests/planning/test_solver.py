"""The solver's choice against all there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale.planning.parts.candidates import AS_IT_IS, Candidate
from memscale.planning.solving.program import Program
from memscale.planning.solving.solver import Chooser, LinkRates
from memscale.planning.trials.costs import Costs, Effect
from memscale.simulation import Interval, Phase
from memscale.transforms import checkpoint, offload

_INTERVALS = tuple(Interval(phase, part, False) for phase in (Phase.FORWARD, Phase.BACKWARD) for part in range(4))


def _costs(seed, parts, menu, together=False):
    random = np.random.default_rng(seed)
    effects = tuple(
        tuple(
            Effect(
                random.integers(0, 1 << 30, len(_INTERVALS)),
                np.zeros(len(_INTERVALS), dtype=np.int64),
                float(random.uniform(0.1, 0.5)),
                float(random.uniform(0.1, 0.5)),
                int(random.integers(0, 1 << 29)) if choice == 2 and part < parts - 1 else 0,
                float(random.uniform(0.0, 0.4)) if choice == 2 and part < parts - 1 else 0.0,
            )
            for choice in range(menu)
        )
        for part in range(parts)
    )
    last = offload(what="params") if together else checkpoint()
    others = [Candidate((("", how),)) for how in ([checkpoint()] * (menu - 2) + [last])]
    moment = random.integers(0, 1 << 31, len(_INTERVALS)) * together
    return Costs(_INTERVALS, (), ((AS_IT_IS, *others),) * parts, effects, 0.5, {}, moment)


def _all(costs):
    return itertools.product(*(range(len(menu)) for menu in costs.effects))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 8),
    st.floats(0.3, 1.1),
    st.sampled_from([None, LinkRates(1e9, 1e9)]),
    st.booleans(),
)
def test_the_fastest_is_that_of_all(seed, parts, share, link, together):
    """Also where what is held for a moment is not, once any part streams."""
    costs = _costs(seed, parts, 3, together)
    limit = share * costs.held_bytes(costs.as_it_is).max()
    fitting = [each for each in _all(costs) if costs.held_bytes(each).max() <= limit]
    choice = Chooser(costs, link).fastest(limit)
    if not fitting:
        assert choice is None
        return
    best = min(costs.seconds(each) for each in fitting)
    assert costs.held_bytes(choice.assignment).max() <= limit * (1 + 1e-6)
    assert costs.seconds(choice.assignment) <= 1.01 * best
    assert choice.bound <= best * (1 + 1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_the_smallest_is_that_of_all(seed, parts):
    costs = _costs(seed, parts, 3)
    choice = Chooser(costs, None).smallest()
    least = min(int(costs.held_bytes(each).max()) for each in _all(costs))
    assert costs.held_bytes(choice.assignment).max() == pytest.approx(least, rel=2e-3)


def test_no_more_moves_than_the_cap_allows():
    costs = _costs(3, 4, 3)
    limit = 0.9 * costs.held_bytes(costs.as_it_is).max()
    cap = 1 << 28
    choice = Chooser(costs, LinkRates(1e12, 1e12, cap)).fastest(limit)
    moved = sum(menu[at].out_bytes for menu, at in zip(costs.effects, choice.assignment, strict=True))
    assert moved <= cap


def test_a_program_that_was_branched_is_as_before_and_prints_nothing(capfd):
    program = Program(np.array([-1.0, -1.0]), np.full(2, 3.0))
    program.wait(np.array([[2.0, 2.0]]), 7.0)
    assert program.branch([0, 1])
    assert program.bound == pytest.approx(-3.0)
    assert program.solve()
    assert program.bound == pytest.approx(-3.5)
    assert capfd.readouterr() == ("", "")
