"""`Weeks`: the weekly reports, as the exact bytes that would be sent."""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from memscale.core import ConfigError
from memscale.telemetry.consent import State, folder
from memscale.telemetry.counters import MOST, SCHEMA, counters

_WEEK = re.compile(r"[0-9]{4}-W[0-9]{2}")


class Weeks:
    """The weeks that were counted on this machine in one state."""

    def __init__(self, state: State) -> None:
        place = Path(folder() or os.devnull)  # without a folder, a path under which nothing exists
        self.counted, self.sent = place / state.value, place / "sent"

    def names(self) -> list[str]:
        """Returns the weeks, oldest first."""
        return sorted(path.stem for path in self.counted.glob("*.txt") if _WEEK.fullmatch(path.stem))

    def unsent(self, before: str) -> list[str]:
        """Returns the weeks before week `before` that were not sent yet."""
        return [name for name in self.names() if name < before and not (self.sent / f"{name}.json").exists()]

    def report(self, week: str, machine: Mapping[str, str]) -> bytes:
        """Returns the report of a week as the bytes to send: JSON in the canonical form of RFC 8785.

        Args:
            week: the week, such as ``"2026-W47"``.
            machine: the fields of the report about the machine.

        Raises:
            ConfigError: nothing was counted in the week.
        """
        if week not in self.names():
            counted = ", ".join(self.names()) or "no week"
            raise ConfigError(
                f"nothing was counted in the week {week!r}; give one as 2026-W47, of those with counts: {counted}"
            )
        found = collections.Counter[str]()
        for line in (self.counted / f"{week}.txt").read_text("ascii", "replace").splitlines():
            call, *facts = line.split(" ")
            found.update([call, *(f"{call}/{fact}" for fact in dict.fromkeys(facts))])
        # Names that are not listed, as in a torn or foreign line, are dropped.
        counts = {name: min(found[name], MOST) for name in counters() if found[name]}
        fields = {"schema": SCHEMA, "week": week, **machine, "counters": counts}
        # To this the canonical form reduces for these keys and integers.
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def keep_sent(self, week: str, report: bytes) -> None:
        """Replaces the counts of a week by a copy of the sent report."""
        self.sent.mkdir(mode=0o700, exist_ok=True)
        (self.sent / f"{week}.json").write_bytes(report)
        (self.counted / f"{week}.txt").unlink()
