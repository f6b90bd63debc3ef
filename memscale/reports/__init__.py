"""Reports of profiles, frontiers and tunings: text for a terminal, pictures and HTML pages.

The first `Profile`, `Frontier` or `Tuning` that prints or draws itself imports this folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

from memscale.reports.chart import commits_chart, step_chart
from memscale.reports.drawing import columns, css_class
from memscale.reports.page import PAGES, checked_target, write_page

if TYPE_CHECKING:
    from memscale.reports.of_steps import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports the names that need PyTorch on first use, so that the server draws its charts without PyTorch."""
    found = {} if name.startswith("_") else vars(importlib.import_module(f"{__name__}.of_steps"))
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = found[name]
    return value
