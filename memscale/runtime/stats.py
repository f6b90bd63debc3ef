"""What a runtime did, as numbers and as a timeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memscale.runtime.backends.protocol import Event, Stream
from memscale.runtime.storage.tiers import TierUse


@dataclasses.dataclass(frozen=True)
class Stats:
    """What an engine moved since it was made, and what it holds now.

    Attributes:
        out_bytes: bytes copied from the device, by the tier they went to.
        in_bytes: bytes copied back, by the tier they came from.
        live_bytes: bytes that lie on each tier now.
        high_water_bytes: the most bytes that each tier held at once.
        reserved_bytes: bytes that each tier has taken from the system.
        fragmentation: the share of the free ones among them that is not in one piece, for each tier.
        held_bytes: in all, bytes of storages that were not moved because something else kept them on the device.
        resident_bytes: in all, bytes kept on the device that could have moved: the forward's tail, which backward
            asks for at once, and what no tier had room for.
        exposed_seconds: how long calling threads were held up by copies. Where instead a stream of the device waits
            for one, the caller goes on, and the stall inside the device is not seen here.
    """

    out_bytes: Mapping[str, int]
    in_bytes: Mapping[str, int]
    live_bytes: Mapping[str, int]
    high_water_bytes: Mapping[str, int]
    reserved_bytes: Mapping[str, int]
    fragmentation: Mapping[str, float]
    held_bytes: int
    resident_bytes: int
    exposed_seconds: float


class Counters:
    """The running numbers behind `Stats`."""

    def __init__(self) -> None:
        self.out_bytes: dict[str, int] = {}
        self.in_bytes: dict[str, int] = {}
        self.live_bytes: dict[str, int] = {}
        self.held_bytes = 0
        self.resident_bytes = 0
        self.exposed_seconds = 0.0

    def frozen(self, usage: Mapping[str, TierUse]) -> Stats:
        return Stats(
            out_bytes=dict(self.out_bytes),
            in_bytes=dict(self.in_bytes),
            live_bytes=dict(self.live_bytes),
            high_water_bytes={tier: use.high_water_bytes for tier, use in usage.items()},
            reserved_bytes={tier: use.reserved_bytes for tier, use in usage.items()},
            fragmentation={tier: use.fragmentation for tier, use in usage.items()},
            held_bytes=self.held_bytes,
            resident_bytes=self.resident_bytes,
            exposed_seconds=self.exposed_seconds,
        )


def add(counter: dict[str, int], tier: str, nbytes: int) -> None:
    """Count `nbytes` more for `tier`, which may be negative."""
    counter[tier] = counter.get(tier, 0) + nbytes


class CopyTimeline:
    """The copies and waits of some steps, for a trace viewer."""

    def __init__(self) -> None:
        self._copies: list[tuple[Stream, str, int, Event]] = []
        self._waits: list[tuple[float, float]] = []

    def copied(self, stream: Stream, tier: str, nbytes: int, event: Event) -> None:
        """Note a copy of `nbytes` from or to `tier` that ends with `event`."""
        self._copies.append((stream, tier, nbytes, event))

    def waited(self, start: float, stop: float) -> None:
        """Note that the caller was held up from `start` to `stop`."""
        self._waits.append((start, stop))

    def to_data(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format that Chrome and Perfetto read; times are microseconds."""
        rows = {"out": 1, "in": 2, "compute": 0}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
            for name, row in rows.items()
        ]
        for stream, tier, nbytes, event in self._copies:
            if (span := event.span()) is not None:
                name = f"to {tier}" if stream == "out" else f"from {tier}"
                events.append(_slice(name, rows[stream], *span, {"nbytes": nbytes}))
        events.extend(_slice("waiting", rows["compute"], start, stop, {}) for start, stop in self._waits)
        return {"traceEvents": events}

    def write(self, path: str | Path) -> None:
        """Write `to_data` as JSON."""
        Path(path).write_text(json.dumps(self.to_data()), encoding="utf-8")


def _slice(name: str, row: int, start: float, stop: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": row, "name": name, "ts": 1e6 * start, "dur": 1e6 * (stop - start), "args": args}
