"""Converts the queues of a schedule to bars over the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from memscale.hardware import COLLECTIVES
from memscale.simulation import Schedule, queues_of

#: The names of the rows, and below the kinds of bars in them: busy, or waiting for a cause.
ROWS = {
    "device": "device",
    "streams": "other streams",
    **{kind: kind for kind in COLLECTIVES},
    "out": "device to host",
    "in": "host to device",
    "disk": "disk",
    "host": "host computes",
}
_BETWEEN_PROCESSES = ("#009E73", "#56B4E9", "#F0E442", "#332288", "#882255")
COLOURS = {"busy": "#4C72B0", "input": "#D55E00", "room": "#CC79A7", "disk": "#8C564B", "host": "#BBBBBB"}
COLOURS |= {"stream": "#E69F00"} | dict(zip(COLLECTIVES, _BETWEEN_PROCESSES, strict=True))
MEANINGS = {
    "busy": "busy",
    "input": "waits for copies back",
    "room": "waits for room",
    "disk": "waits for the disk",
    "host": "waits for the host",
    "stream": "waits for another stream",
    **{kind: f"waits for {kind}" for kind in COLLECTIVES},
}


class Bar(NamedTuple):
    """An interval in seconds in which a queue is ``"busy"``, or the device waits for a cause."""

    begin: float
    end: float
    what: str


def queue_rows(schedule: Schedule | None, *, columns: int) -> dict[str, list[Bar]]:
    """Returns the rows to draw, each with its bars in order; empty for a step without copies and waits.

    Bars that are closer than one of `columns` columns are joined.
    """
    if schedule is None or not (schedule.copies or schedule.collectives or schedule.waits):
        return {}
    found: dict[str, list[Bar]] = {row: [] for row in ROWS}
    spans: list[tuple[str, Any, str]] = [(each.queue, each, "busy") for each in schedule.operators if each.seconds]
    spans += [(queue, copy, "busy") for copy in schedule.copies for queue in queues_of(copy)]
    spans += [(each.kind, each, "busy") for each in schedule.collectives]
    spans += [("device", wait, wait.cause) for wait in schedule.waits if wait.queue == "device"]
    for queue, each, what in spans:
        found[queue].append(Bar(each.begin, min(schedule.seconds, each.begin + each.seconds), what))
    return {row: _joined(sorted(bars), schedule.seconds / columns) for row, bars in found.items() if bars}


def _joined(bars: Iterable[Bar], gap: float) -> list[Bar]:
    """Joins bars of one kind that are closer than `gap` seconds.

    >>> _joined([Bar(0, 1, "busy"), Bar(1.1, 2, "busy"), Bar(2, 3, "room")], 0.5)
    [Bar(begin=0, end=2, what='busy'), Bar(begin=2, end=3, what='room')]
    """
    joined: list[Bar] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if last is not None and bar.what == last.what and bar.begin - last.end < gap:
            joined[-1] = last._replace(end=max(last.end, bar.end))
        else:
            joined.append(bar)
    return joined
