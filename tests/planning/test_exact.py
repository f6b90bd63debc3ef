"""The solver's choice against the exact optimum, by a program that is written apart and shares no code with it."""

import highspy
import numpy as np
import pytest

from memscale.planning.parts.candidates import AS_IT_IS, Candidate
from memscale.planning.parts.parts import Part
from memscale.planning.solving.solver import Chooser, LinkRates
from memscale.planning.trials.costs import Costs, Effect
from memscale.simulation import Interval, Phase
from memscale.transforms import checkpoint
from tests.support.coverings import DEEP

_MENU = 4  # as it is; recomputed; half of it recomputed; moved


def _network(seed, parts, alike):
    """Costs as blocks have them: kept from a forward to its backward, with working sets at their own intervals.

    Args:
        seed: of the sizes and times.
        parts: how many blocks there are; what is outside of them comes last.
        alike: whether they are all the same.
    """
    random = np.random.default_rng(seed)
    intervals = tuple(
        Interval(phase, part, False)
        for phase, order in ((Phase.FORWARD, range(parts)), (Phase.BACKWARD, reversed(range(parts))))
        for part in order
    )
    effects = []
    for part in range(parts):
        if part == 0 or not alike:
            kept, working = int(random.integers(50, 400)) << 20, int(random.integers(20, 300)) << 20
            seconds = float(random.uniform(0.01, 0.04))
            shares = 1, random.uniform(0.02, 0.2), random.uniform(0.3, 0.7), random.uniform(0.02, 0.1)
            again = 0, random.uniform(0.8, 1.1), random.uniform(0.2, 0.6), 0
            waits_share = random.uniform(0.0, 1.5)  # of the time of the copies
        menu = []
        for number, (share, more) in enumerate(zip(shares, again, strict=True)):
            held = np.zeros(len(intervals), dtype=np.int64)
            held[part : 2 * parts - part] = int(share * kept)
            held[part] += working // 2
            held[2 * parts - 1 - part] += working + (int((1 - share) * kept) if number in (1, 2) else 0)
            moved = int((1 - share) * kept) if number == 3 else 0
            none = np.zeros(len(intervals), dtype=np.int64)
            menu.append(Effect(held, none, seconds, (2 + more) * seconds, moved, waits_share * moved / 2e10))
        effects.append(tuple(menu))
    outside = np.full(len(intervals), 100 << 20, dtype=np.int64)
    effects.append((Effect(outside, np.zeros(len(intervals), dtype=np.int64), 0.01, 0.02),))
    candidates = ((AS_IT_IS, *[Candidate((("", checkpoint()),))] * (_MENU - 1)),) * parts
    paths = tuple(Part(f"h.{part}", None, (), 0 if alike else part) for part in range(parts))
    return Costs(intervals, paths, (*candidates, (AS_IT_IS,)), tuple(effects), 0.05, {})


def _optimum(costs, limit):
    """The least time, by branch and bound without a gap; None if nothing fits."""
    program = highspy.Highs()
    program.silent()
    program.setOptionValue("mip_rel_gap", 0.0)
    program.setOptionValue("mip_feasibility_tolerance", 1e-8)
    take = [[program.addBinary() for _ in menu] for menu in costs.effects]
    for row in take:
        program.addConstr(sum(row) == 1)
    for at in range(len(costs.intervals)):
        held = sum(
            float(each.held_bytes[at]) / 1e8 * one
            for menu, row in zip(costs.effects, take, strict=True)
            for each, one in zip(menu, row, strict=True)
        )
        program.addConstr(held <= limit / 1e8)
    seconds = sum(
        each.seconds * one
        for menu, row in zip(costs.effects, take, strict=True)
        for each, one in zip(menu, row, strict=True)
    )
    program.minimize(seconds)
    if program.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return costs.fixed_seconds + program.getObjectiveValue()


@pytest.mark.parametrize("seed", range(3) if DEEP else [0])
@pytest.mark.parametrize(("parts", "alike"), [(40, True), (24, False), (12, False)])
def test_at_most_one_percent_above_the_optimum(parts, alike, seed):
    costs = _network(seed, parts, alike)
    most = costs.held_bytes(costs.as_it_is).max()
    least = costs.held_bytes(Chooser(costs, None).smallest().assignment).max()
    chooser = Chooser(costs, LinkRates(2e10, 2e10))
    for share in (0.15, 0.5, 0.85):
        limit = float(least + share * (most - least))
        best = _optimum(costs, limit)
        choice = chooser.fastest(limit)
        assert costs.held_bytes(choice.assignment).max() <= limit * (1 + 1e-6)
        assert best * (1 - 1e-6) <= chooser.seconds(choice.assignment) <= 1.01 * best
        assert choice.bound <= best * (1 + 1e-5)  # which counts changes as a trace of time


def test_no_more_moves_than_the_host_has_room_for():
    costs, cap = _network(0, 12, alike=False), 1 << 28
    choice = Chooser(costs, LinkRates(1e12, 1e12, cap)).fastest(0.9 * costs.held_bytes(costs.as_it_is).max())
    assert 0 < sum(menu[at].out_bytes for menu, at in zip(costs.effects, choice.assignment, strict=True)) <= cap


def test_of_many_parts_a_choice_is_as_near_to_the_bound():
    costs = _network(1, 80, alike=True)
    as_it_is = costs.held_bytes(costs.as_it_is).max()
    chooser = Chooser(costs, LinkRates(2e10, 2e10))
    for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        choice = chooser.fastest(share * as_it_is)
        assert costs.held_bytes(choice.assignment).max() <= share * as_it_is * (1 + 1e-6)
        assert chooser.seconds(choice.assignment) <= (1 + 1.1e-3) * choice.bound
