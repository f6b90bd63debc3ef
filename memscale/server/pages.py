"""The contents of pages about runs: comparisons, changes by commit, accuracy by card, and proven plans."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from django.db.models import Count, Max, Q
from django.utils.safestring import SafeString, mark_safe

from memscale.reports import step_chart
from memscale.server.models import Document, Run

_MOST_COMMITS = 200
_SPELLED = re.compile(r"^[A-Za-z_][\w.]*$")


def python_of(value: Any) -> str:
    """Returns a transform, a policy or an argument as Python, like its ``repr`` in the library.

    >>> python_of({"type": "compose", "args": [{"type": "offload"}, {"type": "checkpoint", "policy": None}]})
    'compose(offload(), checkpoint(policy=None))'
    """
    if isinstance(value, list):
        return f"({', '.join(map(python_of, value))}{',' * (len(value) == 1)})"
    if not isinstance(value, dict):
        return repr(value)
    spelling = str(value.get("type", ""))
    if not _SPELLED.match(spelling):
        return repr(value)
    arguments = [python_of(each) for each in value.get("args", ())]
    arguments += [f"{key}={python_of(each)}" for key, each in value.items() if key not in ("type", "args")]
    if spelling.startswith("policies.") and not arguments:  # a policy that is a constant has no call
        return spelling
    return f"{spelling}({', '.join(arguments)})"


def timeline(document: Mapping[str, Any]) -> SafeString:
    """Returns the chart of a run's live bytes over the step; empty for a run without them."""
    of_run = document["timeline"] or {"live": {}}
    live_bytes = {category: np.array(values) for category, values in of_run["live"].items() if any(values)}
    if not live_bytes or not of_run["end"]:
        return mark_safe("")
    facts = {name: of_run[name] for name in ("end", "unit", "phases")}
    return mark_safe(step_chart(live_bytes, document["predicted"]["peak_bytes"], **facts))


def plan_as_python(rules: list[dict[str, Any]]) -> str:
    """Returns a plan as Python, one rule per line."""
    lines = [f"    ({rule['path']!r}, {python_of(rule['transform'])})," for rule in rules]
    return "\n".join(["plan = Plan([", *lines, "])"]) if lines else "plan = Plan()"


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int, int, int]]:
    """Returns name, before, after and change of each entry that differs, largest increase first."""
    rows = [(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after}]
    found = [(name, first, second, second - first) for name, first, second in rows if first != second]
    return sorted(found, key=lambda row: (-row[3], row[0]))


def by_module(document: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes at the peak by module."""
    return {path or "(root)": sum(parts.values()) for path, parts in document["predicted"]["by_module"].items()}


def commits(runs: Any) -> list[dict[str, Any]]:
    """Returns the newest run of each commit in order, with the modules that grew most since the previous commit.

    Args:
        runs: the runs of one name on one card.
    """
    newest: dict[str, Run] = {}
    for run in runs.exclude(commit="").order_by("-made", "-id")[: 5 * _MOST_COMMITS]:
        newest.setdefault(run.commit, run)
    ordered = list(reversed(list(newest.values())[:_MOST_COMMITS]))
    rows: list[dict[str, Any]] = [{"run": run, "change": 0, "blamed": []} for run in ordered]
    rising = [
        (first, second) for first, second in pairwise(rows) if second["run"].taken_bytes != first["run"].taken_bytes
    ]
    wanted = {row["run"].pk for pair in rising for row in pair}
    documents = {each.pk: _read(each) for each in Document.objects.filter(pk__in=wanted)}
    for first, second in rising:
        before, after = (by_module(documents[row["run"].pk]) for row in (first, second))
        second["change"] = second["run"].taken_bytes - first["run"].taken_bytes
        second["blamed"] = differences(before, after)[:3] if second["change"] > 0 else []
    return rows


def accuracy(runs: Any) -> list[dict[str, Any]]:
    """Returns the error of predicted peaks for each card, as a share of the measured peak."""
    found: dict[str, list[float]] = {}
    measured = runs.filter(measured_bytes__gt=0).order_by("-made")
    for card, peak, real in measured.values_list("card", "peak_bytes", "measured_bytes")[:20_000]:
        found.setdefault(card, []).append(peak / real - 1)
    return [
        {
            "card": card,
            "runs": len(errors),
            "median": statistics.median(map(abs, errors)),
            "lowest": min(errors),
            "highest": max(errors),
        }
        for card, errors in sorted(found.items())
    ]


def proven(runs: Any) -> list[dict[str, Any]]:
    """Returns plans with their evidence for each model, card and budget; the fastest that fits comes first.

    A run confirms its plan if its measured peak is within the budget, or within the card's memory if there is no
    budget.
    """
    keys = ("model", "card", "budget_bytes", "usable_bytes", "plan__hash")
    rows = (
        runs.filter(plan__isnull=False)
        .values(*keys)
        .annotate(
            runs=Count("id"),
            taken=Max("taken_bytes"),
            seconds=Max("step_seconds"),
            measured=Max("measured_bytes"),
            measurements=Count("measured_bytes"),
            people=Count("sent_by", distinct=True, filter=Q(measured_bytes__isnull=False)),
        )
    )
    found = []
    for row in rows[:2000]:
        limit = row["budget_bytes"] or row["usable_bytes"]
        row["holds"] = row["measured"] is not None and row["measured"] <= limit
        found.append(row)
    return sorted(
        found,
        key=lambda row: (
            *(row["model"], row["card"], row["budget_bytes"] or 0),
            *(not row["holds"], row["seconds"] or 0.0, row["plan__hash"]),
        ),
    )


def _read(document: Document) -> Any:
    return json.loads(document.text)
