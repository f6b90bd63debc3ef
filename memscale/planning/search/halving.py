"""Which rungs of a ladder are simulated for a budget, where an allocator reserves segments: halves, at the same places.

What a step takes is not what was thought of it then, and need not fall from rung to rung. Where each budget looks
elsewhere, a larger one does not find what a smaller one has. Here it has no say in where to look but by whether a step
fits: two budgets look at the same rungs until a step fits the larger one alone, which then looks among faster choices
only, and the smaller one among slower ones.
"""

from __future__ import annotations

from collections.abc import Callable

from memscale.planning.search.ladder import FASTER, USED, WORTH, Ladder, Shown
from memscale.planning.trials.costs import Assignment

#: Each so many-th rung is looked at: a power of two.
GRAIN = 2
# Steps took 0.77 to 1.3 of what was thought of them, most of them 0.94 to 1.1: from what is thought to take so much of
# the budget down to so much; and further down where nothing fits to there.
_ABOVE, _BELOW = 1.06, (0.85, 0.6, 0.0)


def halve(
    ladder: Ladder,
    prove: Callable[[Assignment], Shown],
    is_too_large: Callable[[Assignment], bool],
    limit_bytes: int,
    below: float,
    rounds: int,
) -> list[float]:
    """Simulate choices until one uses what there is or there is nothing left to halve.

    Args:
        ladder: of the choices.
        is_too_large: whether a step takes more than the limit so surely that it need not be simulated, and is no round.
        prove, limit_bytes, below, rounds: as in `Ladder.look`.

    Returns:
        As `Ladder.look`.
    """
    bound: list[float] = []
    shown, surely = set[Assignment](), set[Assignment]()
    fitted = False  # a surer form that fits says nothing of the rungs further down
    late: float | None = None  # by how much steps are later than is thought, at least

    def fitting(assignment: Assignment) -> Shown | None:
        """The step, if it fits."""
        nonlocal late
        if is_too_large(assignment):
            return None
        found = prove(assignment)
        later = found.seconds - ladder.seconds(assignment)
        late = later if late is None else min(late, later)
        return found if found.taken_bytes <= limit_bytes else None

    over = ladder.rung(_ABOVE * limit_bytes) - 1  # the lowest rung that takes more, as far as is known
    for share in _BELOW:
        fits = min(ladder.rung(share * limit_bytes), ladder.last + 1)  # the highest that does not
        while (rung := between(over, fits, GRAIN if share else 1)) is not None:  # the last one is a choice of its own
            choice = ladder.choice(rung)
            if ladder.seconds(choice.assignment) + (late or 0.0) >= below * (1 - FASTER):
                fits = rung  # there is one that is as fast
                continue
            if choice.assignment not in shown and not is_too_large(choice.assignment):
                if not rounds:
                    return bound
                rounds -= 1
            shown.add(choice.assignment)
            found = fitting(choice.assignment)
            if found is None:
                over = ladder.until(choice, rung)
                surer = ladder.surer(choice.assignment, below - (late or 0.0))
                if surer is not None and surer not in shown | surely:
                    surely.add(surer)
                    sure = fitting(surer)
                    if sure is not None:
                        below, bound = min(below, sure.seconds), bound or [choice.bound]
                continue
            fits, below, bound, fitted = rung, min(below, found.seconds), [choice.bound], True
            if found.taken_bytes >= USED * limit_bytes:
                fastest = ladder.seconds(ladder.choice(over + 1).assignment)
                if fastest >= (1 - WORTH) * ladder.seconds(choice.assignment):
                    return bound
        if fitted:
            break
    return bound


def between(low: int, high: int, grain: int) -> int | None:
    """Of the multiples of a power of two between two numbers, both exclusive, the one that most powers of two divide.

    >>> between(64, 100, 1), between(70, 100, 1), between(96, 98, 1), between(96, 97, 1)
    (96, 96, 97, None)
    """
    found = None
    while (number := (low // grain + 1) * grain) < high and found != 0:
        found, grain = number, 2 * grain
    return found
