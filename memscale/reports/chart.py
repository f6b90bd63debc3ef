"""The stacked area of a step as SVG inside a page, and the numbers behind it for a script to look up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from memscale.core import format_bytes
from memscale.reports.drawing import Columns, byte_scale, columns, css_name, placed, thick, time_scale
from memscale.reports.page import chip
from memscale.reports.queues import COLOURS as QUEUE_COLOURS
from memscale.reports.queues import MEANINGS, ROWS, Bar, queue_rows
from memscale.simulation import Profile

_COLUMNS = 720
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 26, 920, 300
_ROW = 18  # the height of a queue
_SHORT = {"out": "to host", "in": "from host", "streams": "streams", "host": "host", "other collectives": "others"}
_LETTER = 6.5  # the width of a letter of 12 pixels

_Number = TypeVar("_Number", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class _PlotArea:
    """Where things are in the picture: positions up to `end`, bytes up to `highest_bytes`."""

    end: float
    highest_bytes: float

    def x(self, position: float) -> float:
        return _LEFT + _WIDTH * position / self.end

    def y(self, nbytes: _Number) -> _Number:
        return _TOP + _HEIGHT * (1 - nbytes / self.highest_bytes)


def chart(profile: Profile) -> str:
    """The picture, the legend with what is live at the peak, and the data as JSON."""
    timeline = profile.timeline
    unit, seconds = time_scale(float(timeline.position[-1])) if timeline.unit == "seconds" else ("", 1.0)
    frame = _PlotArea(float(timeline.position[-1]) / seconds or 1.0, max(1, profile.peak_bytes) * 1.08)
    phases = [(name, begin / seconds) for name, begin in timeline.phases]
    cut = columns(timeline.position, timeline.live_bytes, count=_COLUMNS)
    shown = thick([timeline.live_bytes], profile.peak_bytes)
    total = np.sum(list(cut.live_bytes.values()), axis=0, dtype=np.int64)
    peak = int(total.argmax())
    bottom = _TOP + _HEIGHT
    rows = queue_rows(profile.schedule, columns=_COLUMNS)
    height = bottom + 40 + _ROW * len(rows)
    label = f"Live bytes over the step by category, with a peak of {format_bytes(profile.peak_bytes)}"
    data = {
        "live": [cut.live_bytes[category].tolist() for category in reversed(shown)],
        "total": total.tolist(),
        "peak": peak,
        "phases": phases,
        "end": frame.end,
        "unit": unit,
        "left": _LEFT,
        "width": _WIDTH,
        "span": _LEFT + _WIDTH + 10,
    }
    parts = [
        f'<svg id="chart" viewBox="0 0 {data["span"]} {height}" tabindex="0" role="img" aria-label="{label}">',
        *_grid(frame, unit),
        *_areas(frame, cut, shown),
        *_phases(frame, phases),
        *_peak(frame, profile.peak_bytes, (peak + 0.5) / _COLUMNS),
        *_queues(frame, rows, seconds),
        f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{bottom}"/>',
        "</svg>",
        f'<p class="facts" id="moment">at the peak: {format_bytes(profile.peak_bytes)} live</p>',
        '<ul class="legend">',
        *(
            f"<li>{chip(category)}{escape(category)} <b>{format_bytes(int(cut.live_bytes[category][peak]))}</b></li>"
            for category in reversed(shown)
        ),
        "</ul>",
        *_queue_legend(rows),
        # Only "<" could end a script element early, and JSON can say it in another way.
        '<script type="application/json" id="timeline">',
        json.dumps(data).replace("<", "\\u003c"),
        "</script>",
    ]
    return "\n".join(parts)


def _areas(frame: _PlotArea, cut: Columns, shown: Sequence[str]) -> Iterator[str]:
    edges = np.linspace(_LEFT, _LEFT + _WIDTH, _COLUMNS + 1)
    below = np.zeros(_COLUMNS)
    for category in shown:
        above = below + cut.live_bytes[category]
        there = "".join(f"V{height}H{right}" for height, right in _runs(frame.y(above), edges[1:]))
        back = "".join(f"V{height}H{left}" for height, left in _runs(frame.y(below)[::-1], edges[-2::-1]))
        start = f"M{_LEFT},{frame.y(float(below[0])):.1f}"
        yield f'<path style="fill:var({css_name(category)})" d="{start}{there}{back}Z"/>'
        below = above


def _runs(heights: npt.NDArray[np.float64], ends: npt.NDArray[np.float64]) -> Iterator[tuple[str, str]]:
    """Each height with where it ends, equal neighbours as one, as exact as a picture shows."""
    texts = [f"{height:.1f}" for height in heights]
    for at, text in enumerate(texts):
        if at + 1 == len(texts) or texts[at + 1] != text:
            yield text, f"{ends[at]:.1f}"


def _phases(frame: _PlotArea, phases: Sequence[tuple[str, float]]) -> Iterator[str]:
    for _, begin in phases[1:]:
        at = f"{frame.x(begin):.1f}"
        yield f'<line class="phase" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_TOP + _HEIGHT}"/>'
    for name, begin in placed(phases, frame.end, _LETTER * frame.end / _WIDTH):
        yield f'<text x="{frame.x(begin):.1f}" y="{_TOP - 8}">{escape(name)}</text>'


def _peak(frame: _PlotArea, peak_bytes: int, share: float) -> Iterator[str]:
    height = f"{frame.y(float(peak_bytes)):.1f}"
    yield f'<line class="top" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{height}" y2="{height}"/>'
    yield f'<circle class="dot" cx="{_LEFT + _WIDTH * share:.1f}" cy="{height}" r="4"/>'


def _queues(frame: _PlotArea, rows: Mapping[str, Sequence[Bar]], seconds: float) -> Iterator[str]:
    for place, (row, bars) in enumerate(rows.items()):
        top = _TOP + _HEIGHT + 34 + _ROW * place
        yield f'<text x="{_LEFT - 8}" y="{top + 11}" text-anchor="end">{escape(_SHORT.get(row, row))}</text>'
        for bar in bars:
            left, right = frame.x(bar.begin / seconds), frame.x(bar.end / seconds)
            yield (
                f'<rect class="queue" x="{left:.1f}" y="{top}" width="{max(0.2, right - left):.1f}" '
                f'height="{_ROW - 4}" fill="{QUEUE_COLOURS[bar.what]}"><title>{ROWS[row]}: {MEANINGS[bar.what]}</title>'
                "</rect>"
            )


def _queue_legend(rows: Mapping[str, Sequence[Bar]]) -> Iterator[str]:
    if rows:
        seen = dict.fromkeys(bar.what for bars in rows.values() for bar in bars)
        chips = {what: f'<span class="chip" style="background:{QUEUE_COLOURS[what]}"></span>' for what in seen}
        items = (f"<li>{chips[what]}{MEANINGS[what]}</li>" for what in seen)
        yield f'<ul class="legend queues">{"".join(items)}</ul>'


def _grid(frame: _PlotArea, unit: str) -> Iterator[str]:
    byte_unit, scale = byte_scale(int(frame.highest_bytes))
    for value in ticks(frame.highest_bytes / scale):
        height = frame.y(value * scale)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{value:g} {byte_unit}</text>'
    for value in ticks(frame.end):
        anchor = "end" if value > 0.97 * frame.end else "middle"
        text = f"{value:g} {unit}" if unit else f"{value:.0f}"
        yield f'<text x="{frame.x(value):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="{anchor}">{text}</text>'
    if not unit:
        yield f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 36}" text-anchor="end">operators</text>'


def ticks(end: float) -> list[float]:
    """Round numbers from 0 to `end`, three to seven of them.

    >>> ticks(7.0), ticks(0.12)
    ([0.0, 2.0, 4.0, 6.0], [0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12])
    """
    power = 10.0 ** math.floor(math.log10(end))
    step = next(step for step in (0.2 * power, 0.5 * power, power, 2 * power) if end / step <= 6.5)
    return [float(f"{at * step:.6g}") for at in range(int(end / step + 1e-9) + 1)]
