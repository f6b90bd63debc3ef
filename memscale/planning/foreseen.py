"""The choice on a ladder where a simulation takes a second or more: the fastest that is estimated to fit is simulated.

If it does not, it corrects the estimates.
"""

from __future__ import annotations

from collections.abc import Callable

from memscale.planning.costs import Assignment
from memscale.planning.halving import GRAIN, between
from memscale.planning.ladder import FASTER, Ladder, Seen, Shown
from memscale.planning.solver import Choice

# Estimates of large steps are 0.97 to 1.02 of what these take: what is thought to hold more of the budget than the
# first is not looked at; and before a step has shown more, what is estimated to take more than the other not simulated.
_ABOVE, _OFF = 1.1, 1.01


def foresee(
    ladder: Ladder,
    estimate: Callable[[Assignment], int],
    prove: Callable[[Assignment], Shown],
    limit_bytes: int,
    below: float,
    rounds: int,
    seen: Seen,
) -> list[float]:
    """Simulate choices until one fits or none is estimated to.

    Args:
        ladder: of the choices.
        estimate: what a step takes, without a simulation.
        prove, limit_bytes, below, rounds: as in `Ladder.look`.
        seen: what steps of other ladders were beside their estimates, and by how much they were later than is thought;
            those of here are added.

    Returns:
        As `Ladder.look`.
    """
    failed: set[Assignment] = set()
    for _ in range(rounds):
        most = (seen.share if seen.any else _OFF) * limit_bytes

        def fits(assignment: Assignment, most: float = most) -> bool:
            return assignment not in failed and estimate(assignment) <= most

        choice = _thought_fastest(ladder, fits, limit_bytes, below - seen.late)
        if choice is None:
            break
        found = prove(choice.assignment)
        seen.add(estimate(choice.assignment), ladder.seconds(choice.assignment), found)
        if found.taken_bytes <= limit_bytes:
            return [choice.bound]
        failed.add(choice.assignment)
    return []


def _thought_fastest(
    ladder: Ladder, fits: Callable[[Assignment], bool], limit_bytes: int, below: float
) -> Choice | None:
    """The fastest choice that fits, of the rungs that are looked at and of their surer forms."""
    best: Choice | None = None
    over, under = ladder.rung(_ABOVE * limit_bytes) - 1, ladder.last + 1
    while over + 1 < under:
        rung = between(over, under, GRAIN)
        if rung is None:  # the last one is a choice of its own
            if not over < ladder.last < under:
                break
            rung = ladder.last
        choice = ladder.choice(rung)
        if ladder.seconds(choice.assignment) >= below * (1 - FASTER):
            under = rung  # there is one that is as fast
        elif fits(choice.assignment):
            best, under, below = choice, rung, ladder.seconds(choice.assignment)
        else:
            over = ladder.until(choice, rung)
            surer = ladder.surer(choice.assignment, below)
            if surer is not None and fits(surer):
                best, below = Choice(surer, choice.bound), ladder.seconds(surer)
    return best
