"""The picture of a step's memory: what lived when, stacked by what it was for."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

from memscale._errors import ConfigError, RuntimeUnavailable
from memscale._units import format_bytes, format_seconds
from memscale.profiling._allocator import CATEGORIES, AllocatorTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which readers with colour blindness can tell apart. What a transform can
# remove is warm; what stays whatever one does is cold.
_COLOURS = {
    "parameter": "#0072B2",
    "optimizer state": "#56B4E9",
    "gradient": "#009E73",
    "input": "#333333",
    "activation": "#D55E00",
    "temporary": "#F0B44A",
    "unknown": "#BBBBBB",
}
_INK = "#222222"


def plot_timelines(path: str | PathLike[str], traces: Mapping[str, AllocatorTrace]) -> None:
    """Write a PNG with one panel a trace, side by side on the same axes, each with its peak marked.

    >>> import os, tempfile, torch
    >>> from memscale.profiling._allocator import measure
    >>> trace = measure(lambda: torch.empty(1 << 20, dtype=torch.uint8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_timelines(os.path.join(folder, "memory.png"), {"one buffer": trace})
    ...     os.listdir(folder)
    ['memory.png']

    Args:
        path: where the picture goes; its folder must exist.
        traces: title to trace, from left to right; the later panels also show the first one's peak.

    Raises:
        ConfigError: ``traces`` is empty.
        RuntimeUnavailable: matplotlib is not installed.
    """
    if not traces:
        raise ConfigError("plot_timelines(traces=...) is empty; give it at least one trace")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeUnavailable("plot_timelines needs matplotlib: pip install 'memscale-transforms[plot]'") from error

    highest_bytes = max(1, *(trace.peak_bytes for trace in traces.values()))
    scale, unit = (2**30, "GiB") if highest_bytes >= 2**30 else (2**20, "MiB")
    # A layer thinner than a pixel is only a puzzle in the legend.
    shown = [
        category
        for category in CATEGORIES
        if any(trace.timeline.live_bytes[category].max() > highest_bytes / 500 for trace in traces.values())
    ]
    # A figure of our own and not pyplot's: no window system, no global state left behind.
    figure = Figure(figsize=(1.2 + 5.4 * len(traces), 5.0), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(traces), sharex=True, sharey=True, squeeze=False)[0]
    first_peak_bytes = next(iter(traces.values())).peak_bytes
    for index, (axes, (title, trace)) in enumerate(zip(panels, traces.items(), strict=True)):
        _draw(axes, trace, shown, scale)
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK)
        if index and first_peak_bytes > trace.peak_bytes:
            _mark_saving(axes, trace, first_peak_bytes, scale)
    panels[0].set_ylabel(f"live memory ({unit})", color=_INK)
    panels[0].set_ylim(0, highest_bytes / scale * 1.12)
    panels[0].set_xlim(0, max(trace.timeline.seconds[-1] for trace in traces.values()) or 1.0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=10.5)
    figure.savefig(path, format="png")


def _draw(axes: Axes, trace: AllocatorTrace, shown: list[str], scale: int) -> None:
    seconds = trace.timeline.seconds
    layers = [trace.timeline.live_bytes[category] / scale for category in shown]
    axes.stackplot(seconds, layers, labels=shown, colors=[_COLOURS[c] for c in shown], step="post", linewidth=0)
    peak = int(trace.timeline.total_bytes.argmax())
    peak_height = trace.peak_bytes / scale
    axes.axhline(peak_height, color=_INK, linewidth=1, linestyle=(0, (5, 3)))
    axes.plot([seconds[peak]], [peak_height], "o", color=_INK, markersize=5, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(trace.peak_bytes)}",
        (0, peak_height),
        xytext=(6, 4),
        textcoords="offset points",
        fontsize=11,
        fontweight="bold",
        color=_INK,
    )
    if trace.backward_seconds is not None:
        axes.axvline(trace.backward_seconds, color="white", linewidth=1)
        axes.annotate(
            "backward →",
            (trace.backward_seconds, 0.012),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            color="white",
        )
    axes.set_xlabel(f"seconds of one training step ({format_seconds(trace.seconds)})", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelleft=True)


def _mark_saving(axes: Axes, trace: AllocatorTrace, first_peak_bytes: int, scale: int) -> None:
    share = 1 - trace.peak_bytes / first_peak_bytes
    axes.axhline(first_peak_bytes / scale, color="#888888", linewidth=1, linestyle=":")
    x = 0.93
    axes.annotate(
        "",
        (x, trace.peak_bytes / scale),
        xytext=(x, first_peak_bytes / scale),
        xycoords=("axes fraction", "data"),
        textcoords=("axes fraction", "data"),
        arrowprops={"arrowstyle": "->", "color": _INK, "linewidth": 1.2},
    )
    axes.annotate(
        f"{share:.0%} less",
        (x, (trace.peak_bytes + first_peak_bytes) / 2 / scale),
        xycoords=("axes fraction", "data"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=11,
        color=_INK,
    )
