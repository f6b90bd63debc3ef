"""The document of a run that is sent to a server: JSON with a fixed list of fields. No other data leaves the machine.

docs/server-data.md lists the fields; a server checks documents by the schema in `memscale.server.documents`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from memscale.core import ConfigError
from memscale.history.run import Run

_MOST_BYTES = 256 << 10
_MOST_MODULES = 1000
_MOST_NOTES = 50
# Fields that a run and its document share, and those of a run's profile.
_ALIKE = (
    *("id", "name", "made", "commit", "versions", "simulator", "decision_source", "measured", "model", "config"),
    *("budget_bytes", "timeline"),
)
_PREDICTED = (
    *("peak_bytes", "first_step_peak_bytes", "reserved_peak_bytes", "step_seconds", "flops", "by_category", "by_tier"),
    "exposed_seconds",
)
_LONGEST = {"name": 200, "note": 2000, "path": 300, "config": 2000}


def document_of(run: Run) -> dict[str, Any]:
    """Returns the document of a run; of a very large model, the smallest modules are summed up as ``"(others)"``."""
    profile, hardware = run.profile, run.profile.hardware
    document: dict[str, Any] = {
        "memscale_run_document": 1,
        **{name: _plain(getattr(run, name)) for name in _ALIKE},
        **{name: getattr(run, name)[: _LONGEST[name]] for name in ("name", "config")},
        "shapes": list(run.shapes),
        "hardware": {name: getattr(hardware, name) for name in ("name", "device_type", "memory_bytes", "usable_bytes")},
        "predicted": {
            **{name: _plain(getattr(profile, name)) for name in _PREDICTED},
            "moment": [profile.moment.op, profile.moment.path, profile.moment.phase],
            "by_module": _largest(profile.categories_by_module, _MOST_MODULES),
            "holdings": [dataclasses.asdict(each) for each in profile.holdings],
            "notes": [note[: _LONGEST["note"]] for note in profile.notes[:_MOST_NOTES]],
        },
        "plan": json.loads(run.plan)["rules"] if run.plan else None,
    }
    most = _MOST_MODULES
    while len(json.dumps(document)) > _MOST_BYTES and most > 1:
        most //= 2
        document["predicted"]["by_module"] = _largest(profile.categories_by_module, most)
    return document


def run_of(document: Mapping[str, Any], like: Run) -> Run:
    """Returns the run in a document from a server, for a comparison with `like`, a run of the same step and device.

    Raises:
        ConfigError: the document lacks a field.
    """
    try:
        predicted = document["predicted"]
        profile = dataclasses.replace(
            like.profile,
            **{name: predicted[name] for name in _PREDICTED},
            moment=type(like.profile.moment)(*predicted["moment"]),
            categories_by_module=predicted["by_module"],
            holdings=(),
            notes=tuple(predicted["notes"]),
            seconds_by_module={},
        )
        plan = json.dumps({"memscale_plan": 1, "rules": document["plan"]}) if document["plan"] is not None else ""
        return Run(
            **{name: document[name] for name in _ALIKE},
            profile=profile,
            plan=plan,
            shapes=tuple(document["shapes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the server's answer is no run: {error!r}; check the address") from error


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _largest(modules: Mapping[str, Mapping[str, int]], most: int) -> dict[str, dict[str, int]]:
    """Returns the `most` modules with the most bytes, the rest summed up as one."""
    ordered = sorted(modules, key=lambda path: -sum(modules[path].values()))
    found: dict[str, dict[str, int]] = {}
    for place, path in enumerate(ordered):
        name = path[: _LONGEST["path"]] if place < most - 1 or len(ordered) <= most else "(others)"
        into = found.setdefault(name, {})
        for category, nbytes in modules[path].items():
            into[category] = into.get(category, 0) + nbytes
    return found
