"""Prepares the stacked area chart of a step for an HTML template, with the numbers that its script shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memscale.reports.drawing import Axis, byte_scale, columns, outlines, placed, time_scale, visible_categories
from memscale.reports.queues import Bar, queue_rows
from memscale.simulation import Profile

_COLUMNS = 720
_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 70, 326, 920, 300
_LETTER = 6.5  # the width in pixels of a letter of size 12


@dataclass(frozen=True)
class Chart:
    """The memory of a step as the template ``chart.html`` draws it.

    Attributes:
        peak_bytes: the most live bytes.
        peak: the index of the column with the peak.
        across, up: the axes, in the units of position and of bytes.
        unit, byte_unit: the names of these units; ``unit`` is ``""`` if positions count operators.
        seconds: the seconds in one unit of `across`.
        phases: the names of the phases and their beginnings.
        names: the names of the phases that fit, and the positions of their texts.
        areas: category and outline of each area, from the bottom of the stack up.
        live: category and bytes in each column, from the top of the stack down.
        total: the bytes in each column.
        rows: the bars of each queue.
    """

    peak_bytes: int
    peak: int
    across: Axis
    up: Axis
    unit: str
    byte_unit: str
    seconds: float
    phases: list[tuple[str, float]]
    names: list[tuple[str, float]]
    areas: list[tuple[str, str]]
    live: dict[str, list[int]]
    total: list[int]
    rows: dict[str, list[Bar]]


def chart(profile: Profile) -> Chart:
    """Returns the chart of a profile's step."""
    timeline = profile.timeline
    unit, seconds = time_scale(float(timeline.position[-1])) if timeline.unit == "seconds" else ("", 1.0)
    byte_unit, scale = byte_scale(profile.peak_bytes)
    across = Axis(0.0, float(timeline.position[-1]) / seconds or 1.0, _LEFT, _WIDTH)
    up = Axis(0.0, max(1, profile.peak_bytes) * 1.08 / scale, _BOTTOM, -_HEIGHT)
    phases = [(name, begin / seconds) for name, begin in timeline.phases]
    cut = columns(timeline.position, timeline.live_bytes, count=_COLUMNS)
    shown = visible_categories([timeline.live_bytes], profile.peak_bytes)
    total: list[int] = np.stack([*cut.live_bytes.values()]).sum(axis=0).tolist()
    return Chart(
        peak_bytes=profile.peak_bytes,
        peak=total.index(max(total)),
        across=across,
        up=up,
        unit=unit,
        byte_unit=byte_unit,
        seconds=seconds,
        phases=phases,
        names=placed(phases, across.high, _LETTER * across.high / _WIDTH),
        areas=[*outlines(((each, cut.live_bytes[each] / scale) for each in shown), up, _LEFT, _WIDTH)],
        live={category: cut.live_bytes[category].tolist() for category in reversed(shown)},
        total=total,
        rows=queue_rows(profile.schedule, columns=_COLUMNS),
    )
