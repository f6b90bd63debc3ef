"""Draws a frontier, step time over memory, as a picture or as a page where each point shows its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import NamedTuple

import numpy as np

from memscale.core import ConfigError
from memscale.reports.drawing import Axis, byte_scale, time_scale
from memscale.reports.page import PAGES, checked_target, write_page
from memscale.reports.plot import INK, figure_of, label, plain

_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 80, 360, 900, 340
_ROOM = 0.08  # the margin beyond the outer points, as a share of the axis
_LINE = "#0072B2"  # from the palette of the categories


class Price(NamedTuple):
    """The dollars for `steps` steps of one second each, and the number of steps."""

    dollars: float
    steps: int

    @classmethod
    def of(cls, dollars_an_hour: float, steps: int, caller: str) -> Price:
        """Returns the price for a price of an hour.

        Raises:
            ConfigError: the price is no number above 0, or `steps` is below 1.
        """
        if not (isinstance(dollars_an_hour, (int, float)) and 0 < dollars_an_hour < math.inf):
            raise ConfigError(
                f"{caller}(price={dollars_an_hour!r}) must be dollars an hour above 0; pass 2.50, or None for no price"
            )
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"{caller}(steps={steps!r}) must be an int of at least 1; pass how many are paid for")
        return cls(dollars_an_hour * steps / 3600, steps)

    @property
    def heading(self) -> str:
        return f"dollars for {self.steps:,} steps"


class PartOfPlan(NamedTuple):
    """The transform of a row of equal parts of a model."""

    name: str
    what: str
    kept_bytes: int
    kept_bytes_before: int
    seconds: float
    seconds_before: float
    reasons: Sequence[str]


class DrawnPoint(NamedTuple):
    """A point of the curve.

    Attributes:
        peak_bytes: the device memory of the step, in bytes.
        step_seconds: the time of the step.
        summary: the plan in one line.
        parts: the transform of each part.
        text: the explanation of the plan.
        script: the Python that makes the plan.
    """

    peak_bytes: int
    step_seconds: float
    summary: str
    parts: Sequence[PartOfPlan]
    text: str
    script: str


def plot_frontier(
    choices: Sequence[DrawnPoint], device: str, path: str | PathLike[str], price: Price | None = None
) -> None:
    """Draws the curve as PNG or SVG, by the suffix. A price adds an axis of dollars on the right.

    Raises:
        ConfigError: the suffix is another, or the folder does not exist.
        RuntimeUnavailable: matplotlib is not installed.
    """
    target = checked_target(path, "Frontier.plot", (".png", ".svg"), "use html() for a page")
    drawn = _Axes.of(choices)
    figure = figure_of(9.0, "Frontier.plot")
    axes = figure.subplots()
    memory, time = zip(*drawn.points, strict=True)
    axes.step([*memory, drawn.across.high], [*time, time[-1]], where="post", color=_LINE, linewidth=2)
    axes.plot(memory, time, "o", color=_LINE, markersize=6)
    for each, point in zip(choices, drawn.points, strict=True):
        label(axes, f"{each.step_seconds / choices[-1].step_seconds:.2f}×", point, offset=(5, 6))
    axes.set_xlim(drawn.across.low, drawn.across.high)
    axes.set_ylim(drawn.up.low, drawn.up.high)
    axes.set_xlabel(f"memory of a training step on {device} ({drawn.bytes_unit})", color=INK)
    axes.set_ylabel(f"time of the step ({drawn.seconds_unit})", color=INK)
    plain(axes, grid=True)
    if price is not None:
        dollars = price.dollars * drawn.second
        forth, back = partial(np.multiply, dollars), partial(np.multiply, 1 / dollars)
        right = axes.secondary_yaxis("right", functions=(forth, back))
        right.set_ylabel(price.heading, color=INK)
        right.tick_params(colors=INK)
    figure.savefig(target, format=target.suffix.lower()[1:])


def write_frontier(
    choices: Sequence[DrawnPoint], device: str, path: str | PathLike[str], price: Price | None = None
) -> None:
    """Writes the curve as one self-contained HTML file, where each point shows its plan.

    A price adds an axis of dollars on the right, and a column.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = checked_target(path, "Frontier.html", PAGES, "use plot() for a picture")
    write_page(
        target,
        "frontier.html",
        device=device,
        choices=choices,
        it=(drawn := _Axes.of(choices)),
        price=price,
        dollars=None if price is None else drawn.priced(price),
        ratio=lambda each: f"{each.step_seconds / choices[-1].step_seconds:.2f} ×",
    )


class _Axes(NamedTuple):
    """The axes of the curve in a picture, with their units.

    Attributes:
        across, up: the axes, in the units of bytes and of seconds.
        second: the seconds in one unit of `up`.
        points: the bytes and seconds of each plan, in these units.
    """

    bytes_unit: str
    seconds_unit: str
    across: Axis
    up: Axis
    second: float
    points: list[tuple[float, float]]

    @classmethod
    def of(cls, choices: Sequence[DrawnPoint]) -> _Axes:
        bytes_unit, bytes_scale = byte_scale(choices[-1].peak_bytes)
        seconds_unit, seconds_scale = time_scale(choices[0].step_seconds)
        points = [(each.peak_bytes / bytes_scale, each.step_seconds / seconds_scale) for each in choices]
        memory, time = zip(*points, strict=True)
        across, up = Axis(*_spread(memory), _LEFT, _WIDTH), Axis(*_spread(time), _BOTTOM, -_HEIGHT)
        return cls(bytes_unit, seconds_unit, across, up, seconds_scale, points)

    def priced(self, price: Price) -> Axis:
        """Returns the axis `up` converted to dollars."""
        dollars = price.dollars * self.second
        return Axis(self.up.low * dollars, self.up.high * dollars, self.up.start, self.up.length)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of an axis for these values; a single value is in the middle."""
    least, most = min(values), max(values)
    room = _ROOM * ((most - least) or most or 1.0)
    return max(0.0, least - room), most + room
