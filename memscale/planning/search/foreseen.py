"""The choice on a ladder where a simulation takes a second or more: the fastest that is estimated to fit is simulated.

If it does not, it corrects the estimates.
"""

from __future__ import annotations

from collections.abc import Callable

from memscale.planning.search.halving import GRAIN, between
from memscale.planning.search.ladder import FASTER, USED, Ladder, Seen, Shown
from memscale.planning.solving.solver import Choice
from memscale.planning.trials.costs import Assignment

# From what is thought to hold so much of the budget down to so much; and further down where nothing fits to there.
_ABOVE, _BELOW = 1.1, (0.6, 0.0)
# Estimates of large steps are 0.97 to 1.02 of what these take: before one has shown more, so much is simulated.
_OFF = 1.01


def foresee(
    ladder: Ladder,
    estimate: Callable[[Assignment], int],
    prove: Callable[[Assignment], Shown],
    limit_bytes: int,
    below: float,
    rounds: int,
    seen: Seen,
) -> list[float]:
    """Simulate choices until one uses what there is, or none that is faster is estimated to fit.

    Args:
        ladder: of the choices.
        estimate: what a step takes, without a simulation.
        prove, limit_bytes, below, rounds: as in `Ladder.look`.
        seen: what steps of other ladders were beside their estimates, and by how much they were later than is thought;
            those of here are added.

    Returns:
        As `Ladder.look`.
    """
    bound: list[float] = []
    shown: set[Assignment] = set()
    if not ladder.may_be_faster(min(1.0, seen.share) * limit_bytes, seen.late, below):
        return bound
    for _ in range(rounds):
        most = (seen.share if seen.any else _OFF) * limit_bytes

        def fits(assignment: Assignment, most: float = most) -> bool:
            return assignment not in shown and estimate(assignment) <= most

        choice = _thought_fastest(ladder, fits, limit_bytes, below - seen.late)
        if choice is None:
            break
        found = prove(choice.assignment)
        shown.add(choice.assignment)
        seen.add(estimate(choice.assignment), ladder.seconds(choice.assignment), found)
        if found.taken_bytes <= limit_bytes:
            bound, below = [choice.bound], min(below, found.seconds)
        if USED * limit_bytes <= found.taken_bytes <= limit_bytes:
            break
    return bound


def _thought_fastest(
    ladder: Ladder, fits: Callable[[Assignment], bool], limit_bytes: int, below: float
) -> Choice | None:
    """The fastest choice that fits, of the rungs that are looked at and of their surer forms."""
    best: Choice | None = None
    over = ladder.rung(_ABOVE * limit_bytes) - 1
    for share in _BELOW:
        under = ladder.rung(share * limit_bytes) if share else ladder.last + 1
        while (rung := between(over, under, GRAIN if share else 1)) is not None:
            choice = ladder.choice(rung)
            if ladder.seconds(choice.assignment) >= below * (1 - FASTER):
                under = rung  # there is one that is as fast
                continue
            if fits(choice.assignment):
                best, under, below = choice, rung, ladder.seconds(choice.assignment)
                continue
            over = ladder.until(choice, rung)
            surer = ladder.surer(choice.assignment, below)
            if surer is not None and fits(surer):
                best, below = Choice(surer, choice.bound), ladder.seconds(surer)
        if best is not None or under < ladder.rung(share * limit_bytes):
            break
    return best
