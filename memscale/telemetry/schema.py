"""What a report may be, as JSON Schema: every key and every string is listed, and nothing else passes."""

from __future__ import annotations

import re
from typing import Any

from memscale.telemetry.counters import COMMANDS, counters

__all__ = ["COMMANDS", "MOST", "SCHEMA", "faults", "schema"]

SCHEMA = 2
MOST = 100  # of any count: more is this

_VERSION = r"^[0-9]{1,3}\.[0-9]{1,3}$"
_OS = ("darwin", "linux", "windows", "other")
_ACCELERATORS = ("cuda", "mps", "none", "rocm", "xpu", "other")


def schema(cards: tuple[str, ...]) -> dict[str, Any]:
    """The JSON Schema of a report.

    Args:
        cards: the names that a card can have, beside ``"none"`` and ``"other"``.
    """
    fields: dict[str, Any] = {
        "schema": {"const": SCHEMA},
        "week": {"type": "string", "pattern": "^[0-9]{4}-W[0-9]{2}$"},
        "memscale": {"type": "string", "pattern": _VERSION},
        "python": {"type": "string", "pattern": _VERSION},
        "torch": {"type": "string", "pattern": _VERSION},
        "os": {"enum": list(_OS)},
        "accelerator": {"enum": list(_ACCELERATORS)},
        "card": {"enum": [*cards, "none", "other"]},
        "counters": {
            "type": "object",
            "propertyNames": {"enum": list(counters())},
            "additionalProperties": {"type": "integer", "minimum": 1, "maximum": MOST},
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memscale telemetry report",
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def faults(report: Any, cards: tuple[str, ...]) -> list[str]:
    """What keeps `report` from being one by `schema`; for who receives it, without a library.

    >>> faults({"schema": 2, "host": "mine"}, ())[:2]
    ['host is not listed', 'accelerator is missing']
    """
    if not isinstance(report, dict):
        return ["it is no object"]
    fields: dict[str, dict[str, Any]] = schema(cards)["properties"]
    found = [f"{name} is not listed" for name in sorted(report.keys() - fields.keys())]
    found += [f"{name} is missing" for name in sorted(fields.keys() - report.keys())]
    for name in report.keys() & fields.keys():
        value, rule = report[name], fields[name]
        if name == "counters":
            listed = rule["propertyNames"]["enum"]
            well = isinstance(value, dict) and all(
                each in listed and type(count) is int and 1 <= count <= MOST for each, count in value.items()
            )
        elif "pattern" in rule:
            well = isinstance(value, str) and re.search(rule["pattern"], value) is not None
        else:
            well = type(value) in (int, str) and value in rule.get("enum", [rule.get("const")])
        if not well:
            found.append(f"{name} is not as the schema has it")
    return found
