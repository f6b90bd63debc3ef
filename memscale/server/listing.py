"""Pages of runs by keys: each page begins after the last run of the previous one, in constant time."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.core.paginator import InvalidPage
from django.db.models import Q

SORTS = {"made": "made", "peak": "taken_bytes"}
_ROWS = 50


class Listing:
    """One page of runs, newest or largest first.

    Attributes:
        runs: the runs of this page.
        next: the query string of the next page; ``""`` on the last page.

    Raises:
        InvalidPage: `after` does not come from a page, or `sort` is unknown.
    """

    def __init__(self, runs: Any, filters: Mapping[str, str], sort: str, after: str) -> None:
        if sort not in SORTS:
            raise InvalidPage(f"sort={sort!r} must be one of {', '.join(SORTS)}")
        column = SORTS[sort]
        given = {name: value for name, value in filters.items() if value}
        found = runs.filter(**given).select_related("plan").order_by(f"-{column}", "-id")
        if after:
            value, key = _read(after, column)
            found = found.filter(Q(**{f"{column}__lt": value}) | Q(**{column: value, "id__lt": key}))
            found = found.filter(**{f"{column}__lte": value})  # redundant, but an index can start here and not at an OR
        rows = list(found[: _ROWS + 1])
        self.runs = rows[:_ROWS]
        self.next = ""
        if len(rows) > _ROWS:
            self.next = urlencode({**given, "sort": sort, "after": _written(self.runs[-1], column)})


def _written(run: Any, column: str) -> str:
    value = getattr(run, column)
    text = json.dumps([value.isoformat() if isinstance(value, datetime) else value, run.pk])
    return base64.urlsafe_b64encode(text.encode()).decode()


def _read(after: str, column: str) -> tuple[Any, int]:
    try:
        value, key = json.loads(base64.urlsafe_b64decode(after.encode()))
        if column == "made":
            value = datetime.fromisoformat(value)
            if value.tzinfo is None:
                raise ValueError("a time without its zone")
        if not all(isinstance(each, int) and abs(each) < 1 << 62 for each in (key, 0 if column == "made" else value)):
            raise ValueError("a number out of range")
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        raise InvalidPage(f"after={after[:80]!r} is no place in the list") from error
    return value, key
