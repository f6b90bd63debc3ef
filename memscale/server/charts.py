"""Charts as SVG without inline styles and scripts, which the pages' security policy forbids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from django.utils.safestring import SafeString, mark_safe

from memscale.core import format_bytes
from memscale.reports import COLOURS, Axis, byte_scale, outlines, placed, time_scale

#: The style sheet's class for each category.
CLASSES = {category: f"c-{category.replace(' ', '-')}" for category in COLOURS}
_LEFT, _TOP, _WIDTH, _HEIGHT = 76, 26, 900, 260
_LETTER = 6.5


def timeline_chart(timeline: Mapping[str, Any], peak_bytes: int) -> SafeString:
    """Returns a chart of live bytes over a step, stacked by category."""
    live = {category: values for category, values in timeline["live"].items() if any(values)}
    if not live or not timeline["end"]:
        return mark_safe("")
    unit, scale = time_scale(timeline["end"]) if timeline["unit"] == "seconds" else ("operators", 1.0)
    across = Axis(0.0, timeline["end"] / scale, _LEFT, _WIDTH)
    total = [sum(column) for column in zip(*live.values(), strict=True)]
    up, byte_unit, nbytes = _up(max(peak_bytes, *total))
    parts = [*_grid(up, byte_unit), *_below(across, unit)]
    layers = ((category, np.array(values) / nbytes) for category, values in live.items())
    for category, outline in outlines(layers, up, _LEFT, _WIDTH):
        parts.append(f'<path class="{CLASSES.get(category, "c-other")}" d="{outline}"/>')
    phases = [(name, begin / scale) for name, begin in timeline["phases"]]
    for name, begin in placed(phases, across.high, _LETTER * across.high / _WIDTH) if phases else ():
        parts.append(f'<text x="{across.place(begin)}" y="{_TOP - 8}">{escape(name)}</text>')
    for _, begin in phases[1:]:
        x = across.place(begin)
        parts.append(f'<line class="phase" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_TOP + _HEIGHT}"/>')
    y = up.place(peak_bytes / nbytes)
    parts.append(f'<line class="top" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}"/>')
    return _svg(parts, f"Live bytes over the step by category, with a peak of {format_bytes(peak_bytes)}")


def step_chart(points: Sequence[tuple[str, int, str]]) -> SafeString:
    """Returns a chart with one step per commit, in which each point is a link.

    Args:
        points: label, bytes and address of each commit, in order.
    """
    if not points:
        return mark_safe("")
    up, byte_unit, nbytes = _up(max(value for _, value, _ in points))
    width = _WIDTH / len(points)
    parts = [*_grid(up, byte_unit)]
    heights = [up.place(value / nbytes) for _, value, _ in points]
    line = "".join(f"V{y}H{_LEFT + width * (at + 1):.1f}" for at, y in enumerate(heights))
    parts.append(f'<path class="stairs" d="M{_LEFT},{heights[0]}{line}"/>')
    for at, ((label, value, address), y) in enumerate(zip(points, heights, strict=True)):
        x = _LEFT + width * (at + 0.5)
        text = escape(f"{label}: {format_bytes(value)}")
        parts.append(
            f'<a href="{escape(address)}"><title>{text}</title><circle class="dot" cx="{x:.1f}" cy="{y}" r="5"/></a>'
        )
        if len(points) <= 14 or at % (len(points) // 7) == 0:
            y_text = _TOP + _HEIGHT + 18
            parts.append(f'<text x="{x:.1f}" y="{y_text}" text-anchor="middle">{escape(label[:9])}</text>')
    return _svg(parts, "Peak bytes by commit")


def _up(highest_bytes: int) -> tuple[Axis, str, int]:
    unit, scale = byte_scale(highest_bytes)
    return Axis(0.0, max(1, highest_bytes) * 1.08 / scale, _TOP + _HEIGHT, -_HEIGHT), unit, scale


def _grid(up: Axis, unit: str) -> list[str]:
    parts = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end">{value:g} {unit}</text>')
    return parts


def _below(across: Axis, unit: str) -> list[str]:
    y = _TOP + _HEIGHT + 18
    return [
        f'<text x="{across.place(value)}" y="{y}" text-anchor="{"end" if value > 0.97 * across.high else "middle"}">'
        f"{value:g} {unit}</text>"
        for value in across.ticks()
    ]


def _svg(parts: Sequence[str], label: str) -> SafeString:
    size = f"0 0 {_LEFT + _WIDTH + 10} {_TOP + _HEIGHT + 30}"
    return mark_safe(f'<svg viewBox="{size}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>')
