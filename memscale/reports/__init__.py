"""Profiles for people: text for a terminal, pictures, a page.

Loaded by the first `Profile` that is asked to print or to draw itself, so what it offers is what they ask for.
"""

from memscale.reports.html import write_html
from memscale.reports.plot import plot_profile, plot_timelines
from memscale.reports.text import diff_text, profile_text
from memscale.reports.trace import write_trace

__all__ = [
    "diff_text",
    "plot_profile",
    "plot_timelines",
    "profile_text",
    "write_html",
    "write_trace",
]
