"""Prepares the stacked area chart of a step for an HTML template, with the numbers that its script shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from memscale.reports.drawing import Axis, byte_scale, columns, outlines, placed, time_scale, visible_categories
from memscale.reports.queues import queue_rows
from memscale.simulation import Profile

_COLUMNS = 720
_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 70, 326, 920, 300
_LETTER = 6.5  # the width in pixels of a letter of size 12


def chart(profile: Profile) -> dict[str, Any]:
    """Returns the memory of a profile's step as the template ``chart.html`` draws it.

    ``peak`` is the index of the column with the peak. ``across`` and ``up`` are the axes in the units of position and
    of bytes, ``unit`` and ``byte_unit``; ``unit`` is ``""`` if positions count operators, and ``seconds`` are those of
    one unit. ``areas`` has category and outline from the bottom of the stack up, ``live`` category and bytes in each
    column from its top down, ``total`` the bytes in each column, ``names`` the names of the ``phases`` that fit with
    the positions of their texts, and ``rows`` the bars of each queue.
    """
    timeline = profile.timeline
    unit, seconds = time_scale(float(timeline.position[-1])) if timeline.unit == "seconds" else ("", 1.0)
    byte_unit, scale = byte_scale(profile.peak_bytes)
    across = Axis(0.0, float(timeline.position[-1]) / seconds or 1.0, _LEFT, _WIDTH)
    up = Axis(0.0, max(1, profile.peak_bytes) * 1.08 / scale, _BOTTOM, -_HEIGHT)
    phases = [(name, begin / seconds) for name, begin in timeline.phases]
    live_bytes = columns(timeline.position, timeline.live_bytes, count=_COLUMNS)
    shown = visible_categories([timeline.live_bytes], profile.peak_bytes)
    total: list[int] = np.stack([*live_bytes.values()]).sum(axis=0).tolist()
    return {
        "peak_bytes": profile.peak_bytes,
        "peak": total.index(max(total)),
        "across": across,
        "up": up,
        "unit": unit,
        "byte_unit": byte_unit,
        "seconds": seconds,
        "phases": phases,
        "names": placed(phases, across.high, _LETTER * across.high / _WIDTH),
        "areas": [*outlines(((each, live_bytes[each] / scale) for each in shown), up, _LEFT, _WIDTH)],
        "live": {category: live_bytes[category].tolist() for category in reversed(shown)},
        "total": total,
        "rows": queue_rows(profile.schedule, columns=_COLUMNS),
    }
