"""Draws the live memory of a step over time as stacked areas by category."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from memscale.core import format_bytes, format_seconds, package
from memscale.reports.drawing import COLOURS, byte_scale, columns, edges, placed, time_scale, visible_categories
from memscale.reports.page import checked_target
from memscale.reports.queues import COLOURS as QUEUE_COLOURS
from memscale.reports.queues import MEANINGS, ROWS, Bar, queue_rows
from memscale.reports.text import shortened
from memscale.simulation import Profile
from memscale.simulation.measured import AllocatorTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

INK = "#222222"
BUDGET = "#b3261e"
_COLUMNS = 1200  # about the width of the widest panel in pixels
_LETTER = 0.0095  # the width of a letter of 9 points, as a share of a panel of 8 inches


def plot_timelines(path: str | PathLike[str], traces: Mapping[str, AllocatorTrace]) -> None:
    """Writes a PNG with one panel per trace, side by side on the same axes, each with its peak marked.

    >>> import os, tempfile, torch
    >>> from memscale.simulation.measured.allocator_trace import measure
    >>> trace = measure(lambda: torch.empty(1 << 20, dtype=torch.uint8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_timelines(os.path.join(folder, "memory.png"), {"one buffer": trace})
    ...     os.listdir(folder)
    ['memory.png']

    Args:
        path: the file of the picture; its folder must exist.
        traces: maps titles to traces, from left to right; later panels also show the peak of the first.

    Raises:
        RuntimeUnavailable: matplotlib is not installed.
    """
    highest_bytes = max(1, *(trace.peak_bytes for trace in traces.values()))
    unit, scale = byte_scale(highest_bytes)
    shown = visible_categories([trace.timeline.live_bytes for trace in traces.values()], highest_bytes)
    figure = figure_of(1.2 + 5.4 * len(traces), "plot_timelines")
    panels = figure.subplots(1, len(traces), sharex=True, sharey=True, squeeze=False)[0]
    first_peak_bytes = next(iter(traces.values())).peak_bytes
    for index, (axes, (title, trace)) in enumerate(zip(panels, traces.items(), strict=True)):
        _stack(axes, trace, shown, scale)
        at = float(trace.timeline.position[trace.timeline.total_bytes.argmax()])
        _mark_peak(axes, trace.peak_bytes, at, scale)
        if trace.backward_seconds is not None:
            axes.axvline(trace.backward_seconds, color="white", linewidth=1)
            place, sides = (trace.backward_seconds, 0.012), ("data", "axes fraction")
            label(axes, "backward →", place, sides, offset=(4, 0), color="white")
        axes.set_xlabel(f"seconds of one training step ({format_seconds(trace.seconds)})", color=INK)
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK)
        if index and first_peak_bytes > trace.peak_bytes:
            _mark_saving(axes, trace, first_peak_bytes, scale)
    panels[0].set_ylabel(f"live memory ({unit})", color=INK)
    panels[0].set_ylim(0, highest_bytes / scale * 1.12)
    panels[0].set_xlim(0, max(trace.timeline.position[-1] for trace in traces.values()) or 1.0)
    _legend(figure, panels[0], len(shown))
    figure.savefig(path, format="png")


def plot_profile(profile: Profile, path: str | PathLike[str], budget_bytes: int | None = None) -> None:
    """Writes the picture of `Profile.plot`.

    Raises:
        ConfigError: the suffix is neither ``.png`` nor ``.svg``, or the folder does not exist.
        RuntimeUnavailable: matplotlib is not installed.
    """
    target = checked_target(path, "Profile.plot", (".png", ".svg"), "use html() for a report")
    profile_figure(profile, budget_bytes).savefig(target, format=target.suffix.lower()[1:])


def profile_figure(profile: Profile, budget_bytes: int | None = None) -> Figure:
    """Returns the picture of `plot_profile` as a matplotlib figure."""
    timeline = profile.timeline
    time_unit, seconds = time_scale(float(timeline.position[-1])) if timeline.unit == "seconds" else ("", 1.0)
    position = timeline.position / seconds
    end = float(position[-1]) or 1.0
    unit, scale = byte_scale(profile.peak_bytes)
    shown = visible_categories([timeline.live_bytes], profile.peak_bytes)
    rows = queue_rows(profile.schedule, columns=_COLUMNS)
    figure = figure_of(10.0, "Profile.plot", height=5.0 + 0.25 * len(rows) + 0.3 * bool(rows))
    heights = [5.0, 0.3 * len(rows)][: 1 + bool(rows)]
    axes, *below = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _stack(axes, profile, shown, scale, seconds)
    at = float(position[timeline.total_bytes.argmax()])
    _mark_peak(axes, profile.peak_bytes, at, scale, when=shortened(str(profile.moment), 90))
    phases = [(name, begin / seconds) for name, begin in timeline.phases]
    for name, begin in placed(phases, end, _LETTER * end):
        axes.annotate(name, (begin, 1.01), xycoords=("data", "axes fraction"), fontsize=9, color=INK)
    for _, begin in phases[1:]:
        axes.axvline(begin, color=INK, linewidth=0.6, alpha=0.6)
    title = f"one training step, {profile.hardware.name}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    estimated = "estimated " if profile.method == "static" else ""
    for lower in below:
        _draw_queues(lower, rows, seconds)
    [axes, *below][-1].set_xlabel(f"{estimated}time ({time_unit})" if time_unit else "operators", color=INK)
    axes.set_ylabel(f"live memory ({unit})", color=INK)
    axes.set_ylim(0, max(profile.peak_bytes, budget_bytes or 0) / scale * 1.12)
    axes.set_xlim(0, end)
    if budget_bytes is not None:
        height = budget_bytes / scale
        axes.axhline(height, color=BUDGET, linewidth=1.2)
        text = f"budget {format_bytes(budget_bytes)}"
        label(axes, text, (1, height), ("axes fraction", "data"), offset=(-4, 4), ha="right", color=BUDGET)
    _legend(figure, axes, len(shown))
    return figure


def _draw_queues(axes: Axes, rows: Mapping[str, list[Bar]], seconds: float) -> None:
    """Draws one row of bars per queue."""
    for place, bars in enumerate(rows.values()):
        for what in dict.fromkeys(bar.what for bar in bars):
            spans = [(bar.begin / seconds, (bar.end - bar.begin) / seconds) for bar in bars if bar.what == what]
            axes.broken_barh(spans, (place - 0.35, 0.7), color=QUEUE_COLOURS[what], linewidth=0, label=MEANINGS[what])
    axes.set_yticks(range(len(rows)), [ROWS[row] for row in rows])
    axes.invert_yaxis()
    plain(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))  # a kind of bars occurs in several rows
    axes.legend([*named.values()], [*named], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def figure_of(width: float, caller: str, height: float = 5.0) -> Figure:
    # Without pyplot, which has global state and may need a window system.
    made: Figure = package("matplotlib.figure", caller, "plot").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )
    return made


def plain(axes: Axes, *, grid: bool = False) -> None:
    """Removes the frame of `axes` and sets the colour of texts."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    if grid:
        axes.grid(color="#e2e5e9")


def label(
    axes: Axes, text: str, at: tuple[float, float], coords: Any = "data", *, offset: tuple[float, float], **style: Any
) -> Annotation:
    """Writes `text` at a position plus an offset in points."""
    style = {"fontsize": 9, "color": INK, **style}
    return axes.annotate(text, at, xycoords=coords, xytext=offset, textcoords="offset points", **style)


def _stack(axes: Axes, step: Profile | AllocatorTrace, shown: list[str], scale: int, seconds: float = 1.0) -> None:
    """Draws the stacked areas of the categories in `shown`, in units of `scale` bytes and `seconds` seconds."""
    position = step.timeline.position / seconds
    live_bytes = columns(position, step.timeline.live_bytes, count=_COLUMNS)
    layers = np.array([live_bytes[category] for category in shown]) / scale
    # Only changes and the right edge, since a vector file would otherwise have a point for every pixel.
    kept = [0, *(np.flatnonzero(np.diff(layers).any(axis=0)) + 1), -1]
    colours = [COLOURS[category] for category in shown]
    axes.stackplot(
        edges(position, _COLUMNS)[kept], layers[:, kept], labels=shown, colors=colours, step="post", linewidth=0
    )
    plain(axes)
    axes.tick_params(labelleft=True)


def _mark_peak(axes: Axes, peak_bytes: int, at: float, scale: int, when: str = "") -> None:
    height = peak_bytes / scale
    axes.axhline(height, color=INK, linewidth=1, linestyle=(0, (5, 3)))
    axes.plot([at], [height], "o", color=INK, markersize=5, clip_on=False)
    peak = f"peak {format_bytes(peak_bytes)}"
    how_much = label(axes, peak, (0, height), offset=(6, 4), fontsize=11, fontweight="bold")
    label(axes, when, (1, 0), how_much, offset=(6, 2))


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=count, frameon=False, fontsize=10.5)


def _mark_saving(axes: Axes, trace: AllocatorTrace, first_peak_bytes: int, scale: int) -> None:
    share = 1 - trace.peak_bytes / first_peak_bytes
    axes.axhline(first_peak_bytes / scale, color="#888888", linewidth=1, linestyle=":")
    x, sides = 0.93, ("axes fraction", "data")
    ends = [(x, nbytes / scale) for nbytes in (trace.peak_bytes, first_peak_bytes)]
    arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.2}
    axes.annotate("", ends[0], xytext=ends[1], xycoords=sides, textcoords=sides, arrowprops=arrow)
    middle = (x, (ends[0][1] + ends[1][1]) / 2)
    label(axes, f"{share:.0%} less", middle, sides, offset=(-6, 0), ha="right", va="center", fontsize=11)
