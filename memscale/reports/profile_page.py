"""Writes the page of a profile: its memory over the step, by category, by module and by tensor."""

from __future__ import annotations

from os import PathLike

from memscale.reports import queues
from memscale.reports.chart import step_chart
from memscale.reports.drawing import columns
from memscale.reports.module_tree import Held, module_tree
from memscale.reports.page import PAGES, checked_target, write_page
from memscale.reports.text import alike, facts, is_cut
from memscale.simulation import Profile

_COLUMNS = 720


def write_html(profile: Profile, path: str | PathLike[str]) -> None:
    """Writes the page of `Profile.html`.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = checked_target(path, "Profile.html", PAGES, "use plot() for a picture")
    held = ((path, Held.of(parts)) for path, parts in profile.categories_by_module.items())
    timeline = profile.timeline
    chart = step_chart(
        columns(timeline.position, timeline.live_bytes, count=_COLUMNS),
        profile.peak_bytes,
        end=float(timeline.position[-1]),
        unit=timeline.unit,
        phases=timeline.phases,
        rows=queues.queue_rows(profile.schedule, columns=_COLUMNS),
        queues=queues,
    )
    write_page(
        target,
        "profile.html",
        profile=profile,
        facts=[str(profile.moment), *facts(profile)],
        chart=chart,
        tree=module_tree(held, profile.seconds_by_module.items()) if profile.categories_by_module else None,
        tensors=alike(profile),
        is_cut=is_cut,
    )
