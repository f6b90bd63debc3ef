"""`Stats` and `CopyTimeline`: what a runtime has moved, as numbers and as a trace."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memscale.core import aligned, format_bytes, format_seconds
from memscale.runtime.backends.protocol import Event, Stream
from memscale.runtime.storage.tiers import TierUse


@dataclasses.dataclass(frozen=True)
class Stats:
    """The bytes that an engine has moved so far and that its tiers hold now; prints as a table.

    Attributes:
        out_bytes: bytes copied from the device, by target tier.
        in_bytes: bytes copied back, by source tier.
        live_bytes: bytes on each tier now.
        high_water_bytes: the most bytes on each tier at once.
        reserved_bytes: bytes that each tier has taken from the system.
        fragmentation: for each tier, the share of its free bytes that is outside the largest free piece.
        held_bytes: total bytes of storages that did not move because other references kept them on the device.
        resident_bytes: total bytes that stayed on the device and could have moved: the last tensors of a forward, which
            backward needs at once, and tensors for which no tier had room.
        exposed_seconds: how long calling threads were blocked by copies. Stalls of a device stream that waits for a
            copy are not included, because the caller continues.
        by_region: for each region of ``offload()``, by module, how many saved bytes met which of the `FATES`.
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
    by_region: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        tiers = list(dict.fromkeys((*self.out_bytes, *self.in_bytes, *self.live_bytes)))
        columns = (self.out_bytes, self.in_bytes, self.live_bytes, self.high_water_bytes, self.reserved_bytes)
        rows: list[tuple[str, ...]] = [("tier", "out", "back", "there now", "at most", "reserved")]
        rows += [(tier, *(format_bytes(column.get(tier, 0)) for column in columns)) for tier in tiers]
        lines = aligned(rows, "<>>>>>") if tiers else ["nothing was moved"]
        lines.append(f"callers waited {format_seconds(self.exposed_seconds)} for copies" if tiers else "")
        met = [fate for fate in FATES if any(fates.get(fate) for fates in self.by_region.values())]
        if met:
            header = ("saved by", *(FATES[fate] for fate in met))
            lines += aligned([header, *_shown(self.by_region, met)], "<" + ">" * len(met))
        of_regions = sum(fates.get("moved", 0) for fates in self.by_region.values())
        if (others := sum(self.out_bytes.values()) - of_regions) > 0:
            lines.append(f"{format_bytes(others)} of what went out are parameters and gradients, or kept by a policy")
        return "\n".join(filter(None, lines))


class DeviceStats(dict[str, Stats]):
    """The bytes that a runtime has moved, by device; prints as a table per device.

    >>> print(DeviceStats())
    nothing was moved
    """

    def __str__(self) -> str:
        tables = [f"{device}\n{textwrap.indent(str(stats), '  ')}" for device, stats in self.items()]
        return "\n".join(tables or ["nothing was moved"])


#: What can happen to bytes that a region saves for backward, with the table's column: they move; they stay because a
#: later module or the caller keeps them; they are the last of a forward, which backward needs at once; no tier has
#: room; or their storage is smaller than `min_bytes`.
FATES = {
    "moved": "moved",
    "held": "kept by others",
    "tail": "wanted at once",
    "no room": "no room",
    "small": "below min_bytes",
}
_MOST_REGIONS = 24


def _shown(by_region: Mapping[str, Mapping[str, int]], met: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the rows of the regions, those with the most bytes first."""
    regions = sorted(by_region.items(), key=lambda item: -sum(item[1].values()))
    few = regions[: _MOST_REGIONS if len(regions) <= _MOST_REGIONS else _MOST_REGIONS - 1]
    rows = [(name, *(format_bytes(fates[fate]) if fates.get(fate) else "-" for fate in met)) for name, fates in few]
    if rest := [fates for _, fates in regions[len(few) :]]:
        sums = [sum(fates.get(fate, 0) for fates in rest) for fate in met]
        rows.append((f"({len(rest)} more)", *map(format_bytes, sums)))
    return rows


class Counters:
    """The running totals from which `Stats` are made."""

    def __init__(self) -> None:
        self.out_bytes: dict[str, int] = {}
        self.in_bytes: dict[str, int] = {}
        self.live_bytes: dict[str, int] = {}
        self.held_bytes = 0
        self.resident_bytes = 0
        self.exposed_seconds = 0.0
        self.by_region: dict[str, dict[str, int]] = {}

    def met(self, region: str, fate: str, nbytes: int) -> None:
        """Adds `nbytes` that `region` saved to the given fate."""
        add(self.by_region.setdefault(region, {}), fate, nbytes)

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
            by_region={region: dict(fates) for region, fates in self.by_region.items()},
        )


def add(counter: dict[str, int], tier: str, nbytes: int) -> None:
    """Adds `nbytes`, which may be negative, to the count of `tier`."""
    counter[tier] = counter.get(tier, 0) + nbytes


class CopyTimeline:
    """Records the copies and waits of some steps, for a trace viewer."""

    def __init__(self) -> None:
        self._copies: list[tuple[Stream, str, int, Event]] = []
        self._waits: list[tuple[float, float]] = []

    def copied(self, stream: Stream, tier: str, nbytes: int, event: Event) -> None:
        """Records a copy of `nbytes` to or from `tier` that ends with `event`."""
        self._copies.append((stream, tier, nbytes, event))

    def waited(self, start: float, stop: float) -> None:
        """Records that the caller was blocked from `start` to `stop`, in seconds."""
        self._waits.append((start, stop))

    def to_data(self) -> dict[str, Any]:
        """Returns the timeline in the Trace Event Format of Chrome and Perfetto; times are in microseconds."""
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
        """Writes `to_data` to `path` as JSON."""
        Path(path).write_text(json.dumps(self.to_data()), encoding="utf-8")


def _slice(name: str, row: int, start: float, stop: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": row, "name": name, "ts": 1e6 * start, "dur": 1e6 * (stop - start), "args": args}
