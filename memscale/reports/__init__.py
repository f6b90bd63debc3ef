"""Reports of profiles, frontiers and tunings: text for a terminal, pictures and HTML pages.

The first `Profile`, `Frontier` or `Tuning` that prints or draws itself imports this folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

from memscale.reports.drawing import COLOURS, Axis, byte_scale, columns, outlines, placed, time_scale

if TYPE_CHECKING:
    from memscale.reports.frontier import DrawnPoint, PartOfPlan, Price, plot_frontier, write_frontier
    from memscale.reports.page import PAGES, checked_target, write_html, write_page
    from memscale.reports.plot import plot_profile, plot_timelines
    from memscale.reports.sizes import TriedSize, plot_sizes, write_sizes
    from memscale.reports.text import diff_text, module_text, profile_text
    from memscale.reports.trace import write_trace


# Imported on first use: reports of profiles import the simulation, which the charts of the history server do not need.
_HOMES = {
    name: home
    for home, names in {
        "frontier": "DrawnPoint PartOfPlan Price plot_frontier write_frontier",
        "page": "PAGES checked_target write_html write_page",
        "plot": "plot_profile plot_timelines",
        "sizes": "TriedSize plot_sizes write_sizes",
        "text": "diff_text module_text profile_text",
        "trace": "write_trace",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
