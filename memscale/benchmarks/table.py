"""The rows of the table: each subject simulated as written and in each column; and the differences of two tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memscale.benchmarks.columns import COLUMNS, Column, plans
from memscale.benchmarks.subjects import TableSubject
from memscale.core import format_bytes, format_seconds
from memscale.simulation import MemoryProfiler, Profile

#: The figures that every run on every machine gives alike; the others depend on the machine.
DETERMINISTIC = ("peak_bytes", "reserved_bytes", "step_seconds", "over_plain", "plan", "fits")

Say = Callable[[str], None]


def row(subject: TableSubject, say: Say) -> dict[str, Any]:
    """Returns the figures of `subject` as written and in each column, as JSON data."""
    began = time.perf_counter()
    columns = {title: COLUMNS[title] for title in subject.columns}
    # The step time of a column is compared with plain training in the column's dtype too, which costs no accuracy.
    plain = {dtype: _simulated(subject, dtype, None, say) for dtype in dict.fromkeys(c.dtype for c in columns.values())}
    first = next(iter(plain))
    return {
        "title": subject.title,
        "device": plain[first].hardware.name,
        "published_bytes": subject.published_bytes,
        "published_plain_bytes": subject.published_plain_bytes,
        "plain": {**_figures(plain[first]), "dtype": _name(first)},
        "columns": {
            title: _in_column(subject, column, plain[first], plain[column.dtype], say)
            for title, column in columns.items()
        },
        "took_seconds": round(time.perf_counter() - began, 1),
    }


def _in_column(subject: TableSubject, column: Column, first: Profile, plain: Profile, say: Say) -> dict[str, Any]:
    usable_bytes = limit = plain.hardware.usable_bytes
    if column.share is not None and subject.published_bytes is not None:
        limit = min(limit, int(column.share * subject.published_bytes))
    with torch.device("meta"):
        model = subject.make()
    known = plans(model, subject)
    tried: dict[str, Profile] = {}
    for name in column.names:
        if any(known[name] == known[other] for other in tried):
            continue  # two plans are equal for a batch of one row
        tried[name] = made = _simulated(subject, column.dtype, known[name], say, name)
        if made.peak_bytes <= limit and made.taken_bytes <= usable_bytes:
            break
    else:
        name = min(tried, key=lambda each: tried[each].peak_bytes)
    made = tried[name]
    return {
        **_figures(made),
        "over_plain": _ratio(made.step_seconds, first.step_seconds),
        "over_plain_in_dtype": _ratio(made.step_seconds, plain.step_seconds),
        "aim_bytes": None if column.share is None or subject.published_bytes is None else limit,
        "below_the_device": dict(made.by_tier),
        "dtype": _name(column.dtype),
        "numerics": column.numerics,
        "how": name,
        "plan": json.loads(known[name].to_json())["rules"],
    }


def _simulated(subject: TableSubject, dtype: torch.dtype, plan: Any, say: Say, name: str = "as it is") -> Profile:
    say(f"{subject.title}: {name}, {_name(dtype)}")
    with torch.device("meta"):
        model = subject.make().to(dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    # Published figures are those of Trainers, which free the output before backward.
    profiler = MemoryProfiler(model, optimizer, plan=plan, hardware=subject.device, keeps_output=False)
    return profiler.profile(subject.inputs())


def _figures(made: Profile) -> dict[str, Any]:
    return {
        "peak_bytes": made.peak_bytes,
        "reserved_bytes": made.taken_bytes,
        "step_seconds": made.step_seconds,
        "fits": made.taken_bytes <= made.hardware.usable_bytes,
    }


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one and other else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| model | card | plain | published | column | peak | of published | step | over plain |"]
    lines.append("|---|---|---:|---:|---|---:|---:|---:|---:|")
    for each in rows:
        plain = each["plain"]
        plain_text = f"{_gb(plain['peak_bytes'])}{_unfit(plain)}, {format_seconds(plain['step_seconds'])}"
        for title, found in each["columns"].items():
            published = each["published_bytes"]
            share = "" if published is None else f"{found['peak_bytes'] / published:.2f}"
            lines.append(
                f"| {each['title']} | {each['device']} | {plain_text} | {'' if published is None else _gb(published)} "
                f"| {title}{_unfit(found)} | {_gb(found['peak_bytes'])} | {share} "
                f"| {format_seconds(found['step_seconds'])} | × {found['over_plain']:.2f} |"
            )
    return "\n".join(lines)


def _unfit(found: Mapping[str, Any]) -> str:
    return "" if found["fits"] else " (does not fit)"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each deterministic figure that differs between rows of `old` and `new`."""
    before = {(each["title"], each["device"]): each for each in old}
    for each in new:
        if (was := before.get((each["title"], each["device"]))) is None:
            yield f"{each['title']}: new"
            continue
        parts = [("plain", was["plain"], each["plain"])]
        parts += [(title, was["columns"].get(title, {}), now) for title, now in each["columns"].items()]
        for title, one, other in parts:
            for key in DETERMINISTIC:
                if key in other and one.get(key) != other[key]:
                    yield f"{each['title']}, {title}: {key} {_shown(key, one.get(key))} -> {_shown(key, other[key])}"


def _shown(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return format_seconds(value) if key.endswith("_seconds") and isinstance(value, float) else str(value)
