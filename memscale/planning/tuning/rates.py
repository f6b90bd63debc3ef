"""The search for the size with the highest rate (samples or tokens per second), by bounds between simulated sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Share by which the bound of a size must exceed the best rate for the search to go on: benchmarks/bench_answers.py.
TOLERANCE = 0.005


@dataclass(frozen=True)
class Pace:
    """The pace of a step of one size: a count, such as samples, and the seconds that the step takes.

    Attributes:
        count: samples, tokens or the caller's count in the step.
        plain_seconds: the time of the step without a plan, whether that step fits or not.
        seconds: the time of the step under the fastest plan that fits; infinite if no plan fits.
    """

    count: int
    plain_seconds: float
    seconds: float

    @property
    def rate(self) -> float:
        """Returns the count per second."""
        return self.count / self.seconds


def fastest_size(
    pace: Callable[[int], Pace], known: Mapping[int, Pace], *, most: int
) -> tuple[dict[int, Pace], float | None]:
    """Returns the pace of every simulated size, and an upper bound of the rate of all sizes between the known ones.

    The bound rests on two assumptions: the time that plans add stays equal or rises as sizes grow, and the time of the
    step without a plan is linear between two known sizes. For a size s between the known sizes a and b::

        rate(s) <= count(s) / (plain_seconds(s) + added(a))    # count and plain_seconds on the line from a to b

    The search simulates the middle of the gap with the highest bound. A simulated rate above its bound refutes the
    assumptions; the search then continues without `added`, and returns None in place of the bound: no bound is known.

    >>> step = lambda n: Pace(n, 1 + 0.1 * n, 1 + 0.1 * n + max(0, n - 12) ** 2 / 50)
    >>> found, bound = fastest_size(step, {n: step(n) for n in (1, 8, 64)}, most=12)
    >>> max(found, key=lambda n: found[n].rate), max(range(1, 65), key=lambda n: step(n).rate)
    (14, 14)
    >>> len(found), bound <= step(14).rate * 1.005
    (11, True)

    Args:
        pace: returns the pace of a size.
        known: the paces of the smallest and the largest size, and of any sizes between.
        most: the largest number of further sizes to simulate.
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
    """Returns the highest bound of a rate between neighbouring sizes, with these two sizes."""
    sizes = list(found)
    gaps = [(low, high) for low, high in itertools.pairwise(sizes) if high - low > 1]
    bounds = [(_bound(found, low, high, _added(found, low, as_thought)), low, high) for low, high in gaps]
    return max(bounds, default=(0.0, 0, 0), key=lambda each: (each[0], -each[1]))


def _added(found: Mapping[int, Pace], low: int, as_thought: bool) -> float:
    """Returns the least seconds that the plans of sizes above `low` add to the step."""
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

    # A quotient of two linear functions is monotonic: its maximum is at an end of the range.
    return max(map(rate, inside or (low + 1, high - 1)))
