"""Draws memory and throughput over the batch size (or sequence length), as a picture or as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

from memscale.core import format_bytes, format_count
from memscale.reports.drawing import Axis, byte_scale
from memscale.reports.page import PAGES, checked_target, write_page
from memscale.reports.plot import INK, figure_of, plain

_LINE, _BEST, _TOO_MUCH = "#0072B2", "#D55E00", "#999999"  # from the palette of the categories


class TriedSize(NamedTuple):
    """A size that was tried, with the device memory of its step and its throughput in a second."""

    size: int
    taken_bytes: int
    fits: bool
    per_second: float


def plot_sizes(
    trials: Sequence[TriedSize], best: int, budget_bytes: int, axis: str, unit: str, path: str | PathLike[str]
) -> None:
    """Draws memory and rate over size, as PNG or SVG, by the suffix.

    Args:
        trials: the sizes that were tried, ascending.
        best: the chosen size.
        budget_bytes: the budget of a step, in bytes.
        axis: the name of the size.
        unit: the unit of the rate.
        path: the file of the picture.

    Raises:
        ConfigError: the suffix is another, or the folder does not exist.
        RuntimeUnavailable: matplotlib is not installed.
    """
    target = checked_target(path, "Tuning.plot", (".png", ".svg"), "use to_json() for the numbers")
    figure = figure_of(9.0, "Tuning.plot", height=6.0)
    rate, memory = figure.subplots(2, 1, sharex=True)
    fitting = [each for each in trials if each.fits]
    chosen = [each for each in fitting if each.size == best]
    others = [each for each in trials if not each.fits]
    bytes_unit, scale = byte_scale(max(budget_bytes, *(each.taken_bytes for each in fitting)))
    rate.plot([each.size for each in fitting], [each.per_second for each in fitting], color=_LINE)
    for these, mark, colour, name in (
        (fitting, "o", _LINE, None),
        (chosen, "o", _BEST, f"best: {best}"),
        (others, "x", _TOO_MUCH, "does not fit"),
    ):
        sizes = [each.size for each in these]
        memory.plot(sizes, [each.taken_bytes / scale for each in these], mark, color=colour, label=name)
        if these is not others:
            rate.plot(sizes, [each.per_second for each in these], mark, color=colour, label=name)
    budget = f"the budget, {format_bytes(budget_bytes)}"
    memory.axhline(budget_bytes / scale, color=INK, linewidth=1, linestyle="--", label=budget)
    memory.set_ylim(0, budget_bytes / scale * 1.5)
    rate.set_ylim(bottom=0)
    rate.set_ylabel(f"{unit} a second", color=INK)
    memory.set_ylabel(f"memory of the step ({bytes_unit})", color=INK)
    memory.set_xlabel(axis, color=INK)
    if _is_wide(trials):
        memory.set_xscale("log", base=2)
        memory.xaxis.set_major_formatter("{x:g}")
    for axes in (rate, memory):
        plain(axes, grid=True)
        axes.legend(frameon=False, fontsize=9)
    title = "".join(f"{axis} {best}: {format_count(each.per_second)} {unit}/s" for each in chosen)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.savefig(target, format=target.suffix.lower()[1:])


def write_sizes(
    trials: Sequence[TriedSize], best: int, budget_bytes: int, axis: str, unit: str, path: str | PathLike[str],
    *, text: str, script: str,
) -> None:  # fmt: skip
    """Writes the rate over size as one self-contained HTML page.

    Args:
        trials, best, budget_bytes, axis, unit, path: as in `plot_sizes`.
        text: the explanation of the plan of the best size.
        script: the Python that applies this plan.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = checked_target(path, "Tuning.html", PAGES, "use plot() for a picture")
    scale = math.log2 if _is_wide(trials) else float
    fitting = [each for each in trials if each.fits]
    least, most = scale(trials[0].size), scale(trials[-1].size)
    across = Axis(least - 0.05 * (most - least or 1), most + 0.05 * (most - least or 1), 80, 900)
    up = Axis(0.0, 1.1 * max(each.per_second for each in fitting), 360, -340)
    ticks = [value for value in across.ticks() if not _is_wide(trials) or value == round(value)]
    write_page(
        target,
        "sizes.html",
        title="".join(f"{axis} {best}: {format_count(one.per_second)} {unit}/s" for one in fitting if one.size == best),
        trials=trials,
        best=best,
        budget_bytes=budget_bytes,
        axis=axis,
        unit=unit,
        across=across,
        up=up,
        size_ticks=[(value, f"{2**value if _is_wide(trials) else value:g}") for value in ticks],
        points=[(across.place(scale(each.size)), up.place(each.per_second), each) for each in fitting],
        text=text,
        script=script,
    )


def _is_wide(trials: Sequence[TriedSize]) -> bool:
    """Whether the sizes are drawn on a logarithmic axis."""
    return len(trials) > 1 and trials[-1].size > 8 * trials[0].size
