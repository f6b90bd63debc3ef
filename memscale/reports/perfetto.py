"""Writes a step's schedule in the Trace Event Format, which Chrome and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

from memscale.core import ConfigError
from memscale.reports.page import checked_target
from memscale.reports.queues import MEANINGS, ROWS
from memscale.simulation import Profile, Schedule, queues_of

_NUMBERS = {queue: number for number, queue in enumerate(ROWS)}


def write_trace(profile: Profile, path: str | PathLike[str]) -> None:
    """Writes the file of `Profile.trace`, with times in microseconds.

    Raises:
        ConfigError: the step has no schedule, the suffix is not ``.json``, or the folder does not exist.
    """
    target = checked_target(path, "Profile.trace", (".json",), "use plot() for a picture")
    if profile.schedule is None:
        raise ConfigError(
            "Profile.trace(path) needs a schedule, and this step has none: it was measured, or the speed of "
            f"{profile.hardware.name} is not known; profile it for a card, or after Hardware.measure()"
        )
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": _NUMBERS[queue], "name": "thread_name", "args": {"name": name}}
        for queue, name in ROWS.items()
    ]
    events += [*_slices(profile.schedule), *_memory(profile)]
    target.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _slices(schedule: Schedule) -> Iterator[dict[str, Any]]:
    for name, path, phase, queue, begin, seconds, _ in schedule.operators:
        if seconds:
            yield _slice(name, queue, begin, seconds, {"module": path, "phase": phase})
    for copy in schedule.copies:
        name = f"to {copy.tier}" if copy.direction == "out" else f"from {copy.tier}"
        for queue in queues_of(copy):
            yield _slice(name, queue, copy.begin, copy.seconds, {"nbytes": copy.nbytes})
    for each in schedule.collectives:
        yield _slice(each.kind, each.kind, each.begin, each.seconds, {"nbytes": each.nbytes, "processes": each.size})
    for wait in schedule.waits:
        yield _slice(MEANINGS[wait.cause], wait.queue, wait.begin, wait.seconds, {})


def _memory(profile: Profile) -> Iterator[dict[str, Any]]:
    timeline = profile.timeline
    for at, nbytes in zip(timeline.position.tolist(), timeline.total_bytes.tolist(), strict=True):
        yield {"ph": "C", "pid": 0, "name": "live bytes", "ts": 1e6 * at, "args": {"live": nbytes}}


def _slice(name: str, queue: str, begin: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 0, "tid": _NUMBERS[queue], "name": name, "ts": 1e6 * begin, "dur": 1e6 * seconds, "args": args
    }  # fmt: skip
