"""What memory costs in time: a curve of plans, as a picture and as a page where each point shows its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import NamedTuple

from memscale.core import format_bytes, format_seconds
from memscale.reports.chart import ticks
from memscale.reports.drawing import byte_scale, time_scale
from memscale.reports.page import PAGES, checked_target, header, number, write_page
from memscale.reports.plot import INK, figure_of

_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 20, 900, 340
_ROOM = 0.08  # of an axis, beyond the points at its ends
_LINE = "#0072B2"  # the same palette as that of the categories

_STYLE = f"""
.stairs {{ fill: none; stroke: {_LINE}; stroke-width: 2; }}
.point {{ cursor: pointer; outline: none; }}
.point circle {{ fill: var(--paper); stroke: {_LINE}; stroke-width: 2; }}
.point:hover circle, .point:focus-visible circle {{ fill: var(--hover); stroke-width: 4; }}
.point.shown circle {{ fill: {_LINE}; }}
pre {{ overflow-x: auto; padding: .8rem; background: var(--hover); border-radius: 4px; font-size: .85em; }}
tr.choice {{ cursor: pointer; }}
tr.choice.shown td {{ background: var(--hover); font-weight: 600; }}
"""

_SCRIPT = """
const plans = [...document.querySelectorAll("section.plan")];
const marks = [...document.querySelectorAll("[data-at]")];
function show(at) {
  plans.forEach((plan, index) => { plan.hidden = index !== at; });
  marks.forEach((mark) => { mark.classList.toggle("shown", Number(mark.dataset.at) === at); });
}
marks.forEach((mark) => {
  const at = Number(mark.dataset.at);
  mark.addEventListener("click", () => show(at));
  mark.addEventListener("focus", () => show(at));
});
document.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const next = plans.findIndex((plan) => !plan.hidden) + step;
  if (step && next >= 0 && next < plans.length) { show(next); event.preventDefault(); }
});
show(0);
"""


class PartOfPlan(NamedTuple):
    """What a plan does to parts of a model that are alike."""

    name: str
    what: str
    kept_bytes: int
    kept_bytes_before: int
    seconds: float
    seconds_before: float
    reasons: Sequence[str]


@dataclass(frozen=True)
class DrawnPoint:
    """One point of the curve.

    Attributes:
        peak_bytes: what its step takes of the device.
        step_seconds: how long that takes.
        summary: what it does, in a line.
        parts: what it does to each part.
        text: how it was decided.
        script: the Python that composes it.
    """

    peak_bytes: int
    step_seconds: float
    summary: str
    parts: Sequence[PartOfPlan]
    text: str
    script: str


def plot_frontier(choices: Sequence[DrawnPoint], device: str, path: str | PathLike[str]) -> None:
    """Draw the curve as PNG or SVG, by the suffix.

    Raises:
        ConfigError: the suffix is neither, or the folder does not exist.
        RuntimeUnavailable: matplotlib is not installed.
    """
    target = checked_target(path, "Frontier.plot", (".png", ".svg"), "use html() for a page")
    frame = _Frame.of(choices)
    figure = figure_of(9.0, "Frontier.plot")
    axes = figure.subplots()
    memory = [each.peak_bytes / frame.bytes_scale for each in choices]
    time = [each.step_seconds / frame.seconds_scale for each in choices]
    axes.step([*memory, frame.right], [*time, time[-1]], where="post", color=_LINE, linewidth=2)
    axes.plot(memory, time, "o", color=_LINE, markersize=6)
    for each, x, y in zip(choices, memory, time, strict=True):
        axes.annotate(
            f"{each.step_seconds / choices[-1].step_seconds:.2f}×",
            (x, y),
            xytext=(5, 6),
            textcoords="offset points",
            fontsize=9,
            color=INK,
        )
    axes.set_xlim(frame.left, frame.right)
    axes.set_ylim(frame.bottom, frame.top)
    axes.set_xlabel(f"memory of a training step on {device} ({frame.bytes_unit})", color=INK)
    axes.set_ylabel(f"time of the step ({frame.seconds_unit})", color=INK)
    axes.grid(color="#e2e5e9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    figure.savefig(target, format=target.suffix.lower()[1:])


def write_frontier(choices: Sequence[DrawnPoint], device: str, path: str | PathLike[str]) -> None:
    """Write the curve as one HTML file that needs nothing else; each point shows its plan.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = checked_target(path, "Frontier.html", PAGES, "use plot() for a picture")
    title = f"Memory and time of a training step on {device}"
    write_page(target, title, _body(choices, device), style=_STYLE, script=_SCRIPT)


@dataclass(frozen=True)
class _Frame:
    """The axes: what they go from and to, in their units."""

    bytes_unit: str
    bytes_scale: int
    seconds_unit: str
    seconds_scale: float
    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def of(cls, choices: Sequence[DrawnPoint]) -> _Frame:
        bytes_unit, bytes_scale = byte_scale(choices[-1].peak_bytes)
        seconds_unit, seconds_scale = time_scale(choices[0].step_seconds)
        memory = _spread([each.peak_bytes / bytes_scale for each in choices])
        time = _spread([each.step_seconds / seconds_scale for each in choices])
        return cls(bytes_unit, bytes_scale, seconds_unit, seconds_scale, *memory, *time)

    def x(self, value: float) -> float:
        return _LEFT + _WIDTH * (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - (value - self.bottom) / (self.top - self.bottom))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis for these values; a curve of one point has one in its middle."""
    least, most = min(values), max(values)
    room = _ROOM * ((most - least) or most or 1.0)
    return max(0.0, least - room), most + room


def _body(choices: Sequence[DrawnPoint], device: str) -> Iterator[str]:
    yield f"<h1>What memory costs in time: a training step on {escape(device)}</h1>"
    yield '<p class="facts">Each point is a plan, proved by simulating its step. Click one, or use the arrow keys.</p>'
    yield from _curve(choices)
    yield from _choices(choices)
    for each in choices:
        yield from _plan(each, choices[-1])


def _curve(choices: Sequence[DrawnPoint]) -> Iterator[str]:
    frame = _Frame.of(choices)
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    yield f'<svg viewBox="0 0 {right + 10} {bottom + 44}" role="group" aria-label="Memory and time of each plan">'
    for value in _ticks(frame.left, frame.right):
        at = f"{frame.x(value):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{value:g} {frame.bytes_unit}</text>'
    for value in _ticks(frame.bottom, frame.top):
        at = f"{frame.y(value):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at}" dy="4" text-anchor="end">{value:g} {frame.seconds_unit}</text>'
    places = [
        (frame.x(each.peak_bytes / frame.bytes_scale), frame.y(each.step_seconds / frame.seconds_scale))
        for each in choices
    ]
    stairs = f"M{places[0][0]:.1f},{places[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
    yield f'<path class="stairs" d="{stairs}H{right}"/>'
    for place, ((x, y), each) in enumerate(zip(places, choices, strict=True)):
        title = f"{format_bytes(each.peak_bytes)}, {format_seconds(each.step_seconds)}: {each.summary}"
        yield f'<g class="point" data-at="{place}" tabindex="0" role="button" aria-label="{escape(title)}">'
        yield f'<title>{escape(title)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="7"/></g>'
    yield "</svg>"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two.

    >>> _ticks(9.8, 13.6)
    [10.0, 11.0, 12.0, 13.0]
    """
    step = ticks(high - low)[1]
    return [float(f"{at * step:.6g}") for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _choices(choices: Sequence[DrawnPoint]) -> Iterator[str]:
    yield f"<table>{header('>memory', '>step', '>time', 'plan')}"
    for at, each in enumerate(choices):
        cells = "".join(map(number, (*_takes(each), _ratio(each, choices[-1]))))
        yield f'<tr class="choice" data-at="{at}">{cells}<td class="path">{escape(each.summary)}</td></tr>'
    yield "</table>"


def _plan(each: DrawnPoint, as_it_is: DrawnPoint) -> Iterator[str]:
    memory, time = _takes(each)
    yield f'<section class="plan"><h2>{memory}, {time} a step, {_ratio(each, as_it_is)}</h2>'
    if each.parts:
        names = ("part", ">keeps", ">as it is", ">time", ">as it is", "what is done, and why")
        yield f'<div class="scroll"><table>{header(*names)}'
        for part in each.parts:
            sizes = map(format_bytes, (part.kept_bytes, part.kept_bytes_before))
            times = map(format_seconds, (part.seconds, part.seconds_before))
            cells = "".join(map(number, (*sizes, *times)))
            why = "<br>".join(escape(reason) for reason in part.reasons)
            yield f'<tr><td class="path">{escape(part.name)}</td>{cells}'
            yield f'<td class="path"><b>{escape(part.what)}</b><br>{why}</td></tr>'
        yield "</table></div>"
    yield f"<h2>How it was decided</h2><pre>{escape(each.text)}</pre>"
    yield f"<h2>By hand</h2><pre>{escape(each.script)}</pre></section>"


def _takes(each: DrawnPoint) -> tuple[str, str]:
    return format_bytes(each.peak_bytes), format_seconds(each.step_seconds)


def _ratio(each: DrawnPoint, as_it_is: DrawnPoint) -> str:
    return f"{each.step_seconds / as_it_is.step_seconds:.2f} ×"
