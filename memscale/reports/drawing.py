"""Prepares live memory over a step for drawing: colours of categories, one moment per column of pixels, axes, units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Okabe and Ito's palette, which readers with colour blindness can distinguish. Categories that a transform can reduce
# have warm colours, the others cold ones.
COLOURS = {
    "parameter": "#0072B2",
    "buffer": "#7A8793",
    "optimizer state": "#56B4E9",
    "gradient": "#009E73",
    "input": "#333333",
    "activation": "#D55E00",
    "temporary": "#F0B44A",
    "workspace": "#CC79A7",
    "other": "#BBBBBB",
    "backward": "#009E73",  # for crash reports, which cannot separate gradients from temporary tensors of backward
    "rounding": "#DDDDDD",
}


class Axis(NamedTuple):
    """An axis from `low` to `high` over `length` pixels from `start`; a negative length points upwards.

    >>> axis = Axis(9.8, 13.6, start=100, length=380)
    >>> axis.place(10.8), axis.ticks()
    ('200.0', [10.0, 11.0, 12.0, 13.0])
    >>> Axis(0, 7, 0, 1).ticks(), Axis(0, 0.12, 0, 1).ticks()
    ([0.0, 2.0, 4.0, 6.0], [0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12])
    """

    low: float
    high: float
    start: float
    length: float

    def at(self, value: Any) -> Any:
        """Returns the pixel of a value, or of each value of an array."""
        return self.start + self.length * (value - self.low) / (self.high - self.low)

    def place(self, value: float) -> str:
        """Returns the pixel of a value as text, rounded to what a picture shows."""
        return f"{self.at(value):.1f}"

    def written(self, value: float) -> str:
        """Returns the text of a tick; all ticks of an axis have as many digits after the point.

        >>> axis = Axis(0.07, 0.12, 0, 1)
        >>> [axis.written(value) for value in axis.ticks()]
        ['0.07', '0.08', '0.09', '0.10', '0.11', '0.12']
        """
        digits = max(len(f"{each:g}".partition(".")[2]) for each in self.ticks())
        return f"{value:,.{digits}f}"

    def ticks(self) -> list[float]:
        """Returns about three to seven round numbers between the ends."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span))
        step = next(step for step in (0.2 * power, 0.5 * power, power, 2 * power) if span / step <= 6.5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{at * step:.6g}") for at in range(first, last + 1)]


def css_class(category: str) -> str:
    """Returns the style sheet's class of a category; unknown categories share one.

    >>> css_class("optimizer state"), css_class("of a client")
    ('c-optimizer-state', 'c-other')
    """
    return f"c-{category.replace(' ', '-')}" if category in COLOURS else "c-other"


def percent(part: float, whole: float) -> str:
    """Returns `part` of `whole` in percent, without the percent sign.

    >>> percent(1, 8), percent(1, 8000), percent(0, 8)
    ('12.5', '<0.1', '0.0')
    """
    share = 100 * part / whole if whole else 0.0
    return "<0.1" if 0 < share < 0.05 else f"{share:.1f}"


def edges(position: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Returns the bounds of `count` equal spans of a step, of shape (count + 1,)."""
    return np.linspace(0.0, float(position[-1]) or 1.0, count + 1)


def columns(
    position: npt.NDArray[np.float64], live_bytes: Mapping[str, npt.NDArray[np.int64]], *, count: int
) -> dict[str, npt.NDArray[np.int64]]:
    """Returns live bytes in each of `count` columns of pixels, by category: those of the column's highest moment.

    So a short peak between two pixels stays visible. All categories of a column are of the same moment, so that they
    add up to the live bytes at that moment.

    >>> live = {"activation": np.array([0, 8, 3, 90, 3, 0]), "temporary": np.array([0, 0, 0, 1, 0, 2])}
    >>> cut = columns(np.array([0.0, 0.1, 1.0, 2.5, 2.5, 4.0]), live, count=4)
    >>> {category: values.tolist() for category, values in cut.items()}
    {'activation': [8, 3, 90, 3], 'temporary': [0, 0, 1, 0]}

    Args:
        position: ascending from 0, of shape (moments,).
        live_bytes: by category, the live bytes from each position to the next, of the same shape.
        count: the number of columns, at least 1.
    """
    total = np.sum(list(live_bytes.values()), axis=0)
    bounds = edges(position, count)
    first = np.searchsorted(position, bounds[:-1], side="left").clip(max=len(position) - 1)
    first -= (position[first] > bounds[:-1]) & (first > 0)  # include the moment that was live when the column began
    last = np.searchsorted(position, bounds[1:], side="left")
    last[-1] = len(position)
    spans = zip(first, last, strict=True)
    picked = np.array([low + int(total[low : max(low + 1, high)].argmax()) for low, high in spans])
    return {category: values[picked] for category, values in live_bytes.items()}


def visible_categories(stacks: Sequence[Mapping[str, npt.NDArray[np.int64]]], highest_bytes: int) -> list[str]:
    """Returns the categories to draw: those whose area is at least about a pixel high somewhere."""
    thick = {name for each in stacks for name, values in each.items() if values.max() > highest_bytes / 500}
    return [name for name in dict.fromkeys(name for each in stacks for name in each) if name in thick]


def outlines(
    layers: Iterable[tuple[str, npt.NDArray[np.float64]]], up: Axis, left: float, width: float
) -> Iterator[tuple[str, str]]:
    """Yields each layer's name and the outline of its area as an SVG path; each layer lies on the one before.

    >>> dict(outlines([("a", np.array([1.0, 1.0])), ("b", np.array([0.0, 2.0]))], Axis(0, 4, 40, -40), 0, 10))
    {'a': 'M0,40.0V30.0H10.0V40.0H0.0Z', 'b': 'M0,30.0V30.0H5.0V10.0H10.0V30.0H0.0Z'}

    Args:
        layers: the name and the height of each layer in columns of equal width, in the unit of `up`.
        up: the axis of the heights.
        left, width: the pixel at which the first column begins, and the pixels of all columns.
    """
    below: npt.NDArray[np.float64] | None = None
    for name, heights in layers:
        ends = np.linspace(left, left + width, len(heights) + 1)
        below = np.zeros(len(heights)) if below is None else below
        above = below + heights
        forth = "".join(f"V{height}H{right}" for height, right in _runs(up.at(above), ends[1:]))
        back = "".join(f"V{height}H{start}" for height, start in _runs(up.at(below)[::-1], ends[-2::-1]))
        yield name, f"M{left},{up.place(float(below[0]))}{forth}{back}Z"
        below = above


def _runs(heights: npt.NDArray[np.float64], ends: npt.NDArray[np.float64]) -> Iterator[tuple[str, str]]:
    """Yields the height and the end of each run of equal heights, rounded to what a picture shows."""
    texts = [f"{height:.1f}" for height in heights]
    for at, (text, following) in enumerate(zip(texts, [*texts[1:], ""], strict=True)):
        if text != following:
            yield text, f"{ends[at]:.1f}"


def placed(phases: Sequence[tuple[str, float]], end: float, letter: float) -> list[tuple[str, float]]:
    """Returns the positions of the texts of phase names so that none overlap, without names that do not fit.

    >>> placed([("forward", 0), ("backward", 50), ("optimizer", 98)], 100, letter=1.0)
    [('forward', 21.5), ('backward', 70.0), ('optimizer', 91.0)]
    >>> placed([("forward", 0), ("backward", 2), ("forward", 4), ("backward", 6)], 100, letter=1.0)
    [('forward', 0.0), ('backward', 49.0)]

    Args:
        phases: the names of the phases and their beginnings.
        end: the end of the last phase.
        letter: the width of a letter in the same unit.
    """
    found: list[tuple[str, float]] = []
    free = 0.0
    ends = [*(begin for _, begin in phases[1:]), end]
    for (name, begin), stop in zip(phases, ends, strict=True):
        width = len(name) * letter
        at = min(max((begin + stop - width) / 2, free), end - width)
        if free <= at < stop:
            found.append((name, at))
            free = at + width + letter
    return found


def byte_scale(highest_bytes: int) -> tuple[str, int]:
    """Returns the name and the bytes of the unit for an axis up to `highest_bytes`.

    >>> byte_scale(3 << 20), byte_scale(0)
    (('MiB', 1048576), ('B', 1))
    """
    scales = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next((scale for scale in scales if highest_bytes >= scale[1]), ("B", 1))


def time_scale(end_seconds: float) -> tuple[str, float]:
    """Returns the name and the seconds of the unit for an axis up to `end_seconds`.

    >>> time_scale(0.3)
    ('ms', 0.001)
    """
    return next((scale for scale in (("s", 1.0), ("ms", 1e-3)) if end_seconds >= scale[1]), ("µs", 1e-6))
