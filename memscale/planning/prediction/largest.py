"""The search for the largest size that fits, by a polynomial through the peaks of simulated sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from memscale.core import format_bytes

# Factor by which the polynomial may extrapolate beyond the largest size that fits. At small sizes the optimizer phase
# may hide the growth of other phases; a larger factor then makes a batch that is far too large for nothing:
# benchmarks/bench_answers.py.
_STRIDE = 16
# Simulations in one search for the largest size: benchmarks/bench_answers.py.
MOST_SIMULATIONS = 12


@dataclass(frozen=True)
class LargestBatch:
    """The largest size that fits, with the simulated peaks that prove it.

    Attributes:
        n: the size.
        peak_bytes: the simulated peak at `n`; at most the capacity.
        next_peak_bytes: the simulated peak at ``n + 1``; above the capacity. None if ``n + 1`` was not simulated: `n`
            equals ``at_most``, or the search ended early.
        capacity_bytes: bytes that the step may take.
        simulations: the number of sizes that were simulated.
        too_large: the smallest simulated size that does not fit; None if all simulated sizes fit.
        interrupted: whether the search was stopped from the keyboard.
    """

    n: int
    peak_bytes: int
    next_peak_bytes: int | None
    capacity_bytes: int
    simulations: int
    too_large: int | None = None
    interrupted: bool = False

    def __str__(self) -> str:
        capacity = self.capacity_bytes
        if self.next_peak_bytes is not None:
            beyond = f"{self.n + 1} would take {format_bytes(self.next_peak_bytes - capacity)} too much"
        elif self.too_large is not None:
            beyond = f"{self.too_large} would take too much"
        else:
            beyond = "the largest so far" if self.interrupted else "larger sizes were not searched"
        beyond += ", stopped" if self.interrupted else ""
        left = f"{format_bytes(capacity - self.peak_bytes)} of the {format_bytes(capacity)}"
        return f"{self.n} fits and leaves {left}; {beyond} (sizes simulated: {self.simulations})"


def largest_fitting(
    peak: Callable[[int], int], capacity_bytes: int, *, at_least: int, at_most: int, most: float = math.inf
) -> tuple[int | None, dict[int, int]]:
    """Returns the largest n whose peak is at most the capacity, and the peaks of all simulated sizes.

    None as the first result means: `at_least` does not fit. The next size to simulate is the largest at which a
    polynomial of degree 2 through the three nearest peaks fits, or, if that size is known to fit, the size after it,
    which proves the answer if it does not fit. The search bisects instead after a size that less than halved the
    interval, as happens where the allocator rounds up or where the peak moves to another phase. After `most` sizes the
    search ends with the largest size found.

    >>> largest_fitting(lambda n: 100 + 7 * n + 3 * n * n, 10_000, at_least=1, at_most=1000)
    (56, {1: 110, 2: 126, 32: 3396, 56: 9900, 57: 10246})

    Args:
        peak: returns the peak in bytes at size n; the peak must not fall as n grows.
        capacity_bytes: bytes that the step may take.
        at_least, at_most: the range of sizes, both inclusive.
        most: the largest number of sizes to simulate.
    """
    peaks: dict[int, int] = {}

    def fits(n: int) -> bool:
        peaks[n] = peak(n)
        return peaks[n] <= capacity_bytes

    if not fits(at_least):
        return None, peaks
    low, high = at_least, at_most + 1  # invariant: `low` fits; `high` does not fit or is ``at_most + 1``
    halve = False
    while high - low > 1 and len(peaks) < most:
        width = high - low
        n = (low + high) // 2 if halve else max(low + 1, _on_curve(peaks, low, high - 1, capacity_bytes))
        low, high = (n, high) if fits(n) else (low, n)
        halve = high in peaks and 2 * (high - low) > width
    return low, peaks


def _on_curve(peaks: Mapping[int, int], low: int, high: int, capacity_bytes: int) -> int:
    """Returns the largest n from `low` to `high` at which the polynomial through the three nearest peaks fits."""
    if len(peaks) == 1:
        return min(2 * low, high)
    below = sorted((n for n in peaks if n <= low), reverse=True)
    above = sorted(n for n in peaks if n > low)
    curve = _interpolation({n: peaks[n] for n in (below[0], *above[:1], *below[1:], *above[1:])[:3]})
    first, last = low, min(_STRIDE * low, high)
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if curve(middle) <= capacity_bytes else (first, middle - 1)
    return first


def _interpolation(points: Mapping[int, int]) -> Callable[[int], Fraction]:
    """Returns the polynomial through `points`, in exact fractions, by Newton's divided differences."""
    places = list(points)
    coefficients = [Fraction(value) for value in points.values()]
    for order in range(1, len(places)):
        for at in range(len(places) - 1, order - 1, -1):
            coefficients[at] = (coefficients[at] - coefficients[at - 1]) / (places[at] - places[at - order])

    def value(n: int) -> Fraction:
        total = Fraction(0)
        for place, coefficient in zip(reversed(places), reversed(coefficients), strict=True):
            total = total * (n - place) + coefficient
        return total

    return value
