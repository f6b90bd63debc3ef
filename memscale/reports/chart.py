"""Draws charts for HTML pages by the template ``chart.html``, with the numbers that the script of the pages shows.

This file loads no PyTorch: the server draws a recorded run as `Profile.html` draws a profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memscale.core import format_bytes
from memscale.reports.drawing import Axis, byte_scale, outlines, placed, time_scale, visible_categories
from memscale.reports.page import environment

_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 70, 326, 920, 300
_LETTER = 6.5  # the width in pixels of a letter of size 12


def step_chart(
    live_bytes: Mapping[str, npt.NDArray[np.int64]],
    peak_bytes: int,
    *,
    end: float,
    unit: str,
    phases: Sequence[tuple[str, float]],
    **queues: Any,
) -> str:
    """Returns the stacked area of a step as HTML, with its legend and the data for the script.

    Args:
        live_bytes: by category, the live bytes in each column of pixels, from the bottom of the stack up.
        peak_bytes: the peak of the step.
        end: the position at which the step ends.
        unit: the unit of positions; they count operators unless it is ``"seconds"``.
        phases: the names of the phases with the positions of their beginnings.
        queues: ``rows``, the bars of each queue in seconds, and the texts and colours of these (see `queues`).
    """
    time_unit, seconds = time_scale(end) if unit == "seconds" else ("", 1.0)
    byte_unit, scale = byte_scale(peak_bytes)
    across = Axis(0.0, end / seconds or 1.0, _LEFT, _WIDTH)
    up = _up(peak_bytes, scale)
    begins = [(name, begin / seconds) for name, begin in phases]
    shown = visible_categories([live_bytes], peak_bytes)
    total: list[int] = np.stack([*live_bytes.values()]).sum(axis=0).tolist()
    return _drawn(
        "chart",
        peak_bytes=peak_bytes,
        peak=total.index(max(total)),
        across=across,
        up=up,
        unit=time_unit,
        byte_unit=byte_unit,
        seconds=seconds,
        phases=begins,
        names=placed(begins, across.high, _LETTER * across.high / _WIDTH),
        areas=[*outlines(((each, live_bytes[each] / scale) for each in shown), up, _LEFT, _WIDTH)],
        live={category: live_bytes[category].tolist() for category in reversed(shown)},
        total=total,
        **{"rows": {}, **queues},
    )


def commits_chart(points: Sequence[tuple[str, int, str]]) -> str:
    """Returns a chart of bytes by commit as HTML, in which each point is a link.

    Args:
        points: label, bytes and address of each commit, in order; at least one.
    """
    highest_bytes = max(nbytes for _, nbytes, _ in points)
    byte_unit, scale = byte_scale(highest_bytes)
    up = _up(highest_bytes, scale)
    width = _WIDTH / len(points)
    marks = [
        (f"{_LEFT + width * (at + 0.5):.1f}", up.place(nbytes / scale), label, f"{label}: {format_bytes(nbytes)}", href)
        for at, (label, nbytes, href) in enumerate(points)
    ]
    labelled = 1 if len(points) <= 14 else len(points) // 7
    return _drawn("commits", up=up, byte_unit=byte_unit, width=width, marks=marks, labelled=labelled)


def _up(highest_bytes: int, scale: int) -> Axis:
    return Axis(0.0, max(1, highest_bytes) * 1.08 / scale, _BOTTOM, -_HEIGHT)


def _drawn(macro: str, **values: Any) -> str:
    return str(getattr(environment().get_template("chart.html").module, macro)(values))
