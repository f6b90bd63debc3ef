"""Pages of runs by keys: each page begins after the last run of the previous one, in constant time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.db.models import Q

from memscale.server.problems import Problem

SORTS = {"made": "made", "peak": "taken_bytes"}
_ROWS = 50


class Listing:
    """One page of runs, newest or largest first.

    Attributes:
        runs: the runs of this page.
        next: the query string of the next page; ``""`` on the last page.

    Raises:
        Problem: 400 if `after` is no run of the list, or `sort` is unknown.
    """

    def __init__(self, runs: Any, filters: Mapping[str, str], sort: str, after: str) -> None:
        if sort not in SORTS:
            raise Problem(400, f"sort={sort!r}", f"must be one of {', '.join(SORTS)}", "leave it out")
        column = SORTS[sort]
        given = {name: value for name, value in filters.items() if value}
        found = runs.filter(**given).select_related("plan").order_by(f"-{column}", "-id")
        if after:
            last = runs.filter(uid=after).first()
            if last is None:
                raise Problem(400, f"after={after!r} is no run here", "a page follows another", "begin at the first")
            value = getattr(last, column)
            found = found.filter(Q(**{f"{column}__lt": value}) | Q(**{column: value, "id__lt": last.pk}))
            found = found.filter(**{f"{column}__lte": value})  # redundant, but an index can start here and not at an OR
        rows = list(found[: _ROWS + 1])
        self.runs = rows[:_ROWS]
        self.next = ""
        if len(rows) > _ROWS:
            self.next = urlencode({**given, "sort": sort, "after": self.runs[-1].uid})
