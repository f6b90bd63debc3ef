"""What steps with batches of different sizes take and get through, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

from memscale.core import format_bytes
from memscale.reports.drawing import byte_scale
from memscale.reports.page import checked_target
from memscale.reports.plot import INK, figure_of

_LINE, _BEST, _TOO_MUCH = "#0072B2", "#D55E00", "#999999"  # of the palette of the categories


class TriedSize(NamedTuple):
    """A size that was tried: what its step takes of the device, and what it gets through in a second."""

    size: int
    taken_bytes: int
    fits: bool
    per_second: float


def plot_sizes(
    trials: Sequence[TriedSize], best: int, budget_bytes: int, axis: str, unit: str, path: str | PathLike[str]
) -> None:
    """Draw memory and rate over size, as PNG or SVG, by the suffix.

    Args:
        trials: by size.
        best: the size that was chosen.
        budget_bytes: what a step may take.
        axis: what a size is.
        unit: of the rate.
        path: of the picture.

    Raises:
        ConfigError: the suffix is neither, or the folder does not exist.
        RuntimeUnavailable: matplotlib is not installed.
    """
    target = checked_target(path, "Tuning.plot", (".png", ".svg"), "use to_json() for the numbers")
    figure = figure_of(9.0, "Tuning.plot", height=6.0)
    rate, memory = figure.subplots(2, 1, sharex=True)
    fitting = [each for each in trials if each.fits]
    others = [each for each in trials if not each.fits]
    chosen = [each for each in fitting if each.size == best]
    bytes_unit, scale = byte_scale(max(budget_bytes, *(each.taken_bytes for each in fitting)))
    rate.plot([each.size for each in fitting], [each.per_second for each in fitting], "o-", color=_LINE)
    rate.plot(
        [each.size for each in chosen], [each.per_second for each in chosen], "o", color=_BEST, label=f"best: {best}"
    )
    memory.plot([each.size for each in fitting], [each.taken_bytes / scale for each in fitting], "o", color=_LINE)
    memory.plot([each.size for each in chosen], [each.taken_bytes / scale for each in chosen], "o", color=_BEST)
    memory.plot(
        [each.size for each in others],
        [each.taken_bytes / scale for each in others],
        "x",
        color=_TOO_MUCH,
        label="does not fit",
    )
    memory.axhline(
        budget_bytes / scale, color=INK, linewidth=1, linestyle="--", label=f"the budget, {format_bytes(budget_bytes)}"
    )
    memory.set_ylim(0, budget_bytes / scale * 1.5)
    rate.set_ylim(bottom=0)
    rate.set_ylabel(f"{unit} a second", color=INK)
    memory.set_ylabel(f"memory of the step ({bytes_unit})", color=INK)
    memory.set_xlabel(axis, color=INK)
    if len(trials) > 1 and trials[-1].size > 8 * trials[0].size:
        memory.set_xscale("log", base=2)
    for axes in (rate, memory):
        axes.grid(color="#e2e5e9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(target, format=target.suffix.lower()[1:])
