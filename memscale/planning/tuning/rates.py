"""The size at which a step gets through most in its time: a search that bounds what the sizes between can reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: By how much the rate of another size must be above the best one's to be worth another look.
TOLERANCE = 0.005


@dataclass(frozen=True)
class Pace:
    """What a step of one size gets through.

    Attributes:
        count: what is counted, such as samples.
        plain_seconds: the time of the step as it is, whether it fits or not.
        seconds: that of the step which fits; infinite if none does.
    """

    count: int
    plain_seconds: float
    seconds: float

    @property
    def rate(self) -> float:
        """What it gets through in a second."""
        return self.count / self.seconds


def fastest_size(
    pace: Callable[[int], Pace], known: Mapping[int, Pace], *, most: int
) -> tuple[dict[int, Pace], float | None]:
    """The pace of every size that was looked at, and the rate that no size between can exceed.

    As sizes grow, a plan has to give up more time for memory, so the time that plans add does not fall, and the time of
    the step as it is follows a line between two sizes that are known. So much for where to look; each size that is
    looked at also shows whether it is so. If it once is not, sizes are looked at all the same, and there is no bound.

    >>> step = lambda n: Pace(n, 1 + 0.1 * n, 1 + 0.1 * n + max(0, n - 12) ** 2 / 50)
    >>> found, bound = fastest_size(step, {n: step(n) for n in (1, 8, 64)}, most=12)
    >>> max(found, key=lambda n: found[n].rate), max(range(1, 65), key=lambda n: step(n).rate)
    (14, 14)
    >>> len(found), bound <= step(14).rate * 1.005
    (11, True)

    Args:
        pace: of a size.
        known: the paces of the smallest and the largest size, and of any between.
        most: how many more to look at.
    """
    found = dict(sorted(known.items()))
    as_thought = True
    for _ in range(most):
        best = max(each.rate for each in found.values())
        bound, low, high = _widest(found, as_thought)
        if bound <= best * (1 + TOLERANCE):
            break
        size = (low + high) // 2
        thought = _bound(found, low, high, _added(found, low, as_thought), inside=(size, size))
        found = dict(sorted({**found, size: pace(size)}.items()))
        as_thought = as_thought and found[size].rate <= thought * (1 + TOLERANCE)
    best = max(each.rate for each in found.values())
    return found, max(best, _widest(found, True)[0]) if as_thought else None


def _widest(found: Mapping[int, Pace], as_thought: bool) -> tuple[float, int, int]:
    """Between which neighbours the rate may be highest, and how high."""
    sizes = list(found)
    gaps = [(low, high) for low, high in itertools.pairwise(sizes) if high - low > 1]
    bounds = [(_bound(found, low, high, _added(found, low, as_thought)), low, high) for low, high in gaps]
    return max(bounds, default=(0.0, 0, 0), key=lambda each: (each[0], -each[1]))


def _added(found: Mapping[int, Pace], low: int, as_thought: bool) -> float:
    """What the plans of sizes beyond `low` add to the time of the step at least."""
    if not as_thought:
        return 0.0
    fitting = (each for size, each in found.items() if size <= low and math.isfinite(each.seconds))
    return max((each.seconds - each.plain_seconds for each in fitting), default=0.0)


def _bound(
    found: Mapping[int, Pace], low: int, high: int, added: float, *, inside: tuple[int, int] | None = None
) -> float:
    first, last = found[low], found[high]

    def rate(size: int) -> float:
        share = (size - low) / (high - low)
        count = first.count + share * (last.count - first.count)
        return count / (first.plain_seconds + share * (last.plain_seconds - first.plain_seconds) + added)

    # One line over another: it only rises, or only falls.
    return max(map(rate, inside or (low + 1, high - 1)))
