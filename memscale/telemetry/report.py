"""A week's report: what was counted in it, as the bytes that would be sent."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from memscale.core import ConfigError
from memscale.telemetry.consent import State, folder
from memscale.telemetry.counters import MOST, SCHEMA, counters

_MOST_BYTES = 2 << 20
_WEEK = re.compile(r"[0-9]{4}-W[0-9]{2}")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a report says of the machine: each from a closed list, or two numbers of a version."""

    memscale: str
    python: str
    torch: str
    os: str
    accelerator: str
    card: str


class Weeks:
    """The weeks that were counted on this machine while the state was `state`."""

    def __init__(self, state: State) -> None:
        place = Path(folder() or os.devnull)  # in which there is nothing
        self.counted, self.sent = place / state.value, place / "sent"

    def names(self) -> list[str]:
        """The weeks, the oldest first."""
        return sorted(path.stem for path in self.counted.glob("*.txt") if _WEEK.fullmatch(path.stem))

    def unsent(self, before: str) -> list[str]:
        """The weeks that are over by week `before`, and were not sent yet."""
        return [name for name in self.names() if name < before and not (self.sent / f"{name}.json").exists()]

    def report(self, week: str, machine: Machine) -> bytes:
        """The report of a week, as it is sent.

        Raises:
            ConfigError: nothing was counted in it, or its file cannot be read.
        """
        return canonical(
            {"schema": SCHEMA, "week": week, **dataclasses.asdict(machine), "counters": self._counters(week)}
        )

    def keep_sent(self, week: str, report: bytes) -> None:
        """Keep a copy of what was sent, in the place of what was counted.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.sent.mkdir(mode=0o700, exist_ok=True)
            (self.sent / f"{week}.json").write_bytes(report)
            (self.counted / f"{week}.txt").unlink()
        except OSError as error:
            message = f"the week {week} was sent, and {error.filename} cannot be written: {error.strerror}"
            raise ConfigError(message) from error

    def _counters(self, week: str) -> dict[str, int]:
        if week not in self.names():
            raise ConfigError(f"nothing was counted in the week {week!r}; there is {', '.join(self.names()) or 'none'}")
        try:
            with open(self.counted / f"{week}.txt", "rb") as file:
                lines = file.read(_MOST_BYTES).decode("ascii", "replace").splitlines()
        except OSError as error:
            raise ConfigError(f"the counts of the week {week} cannot be read: {error.strerror}") from error
        found = collections.Counter[str]()
        for line in lines:
            call, *facts = line.split(" ")
            found.update([call, *(f"{call}/{fact}" for fact in dict.fromkeys(facts))])
        # A torn or a foreign line has names that are not listed, and says nothing.
        return {name: min(found[name], MOST) for name in counters() if found[name]}


def canonical(report: dict[str, Any]) -> bytes:
    """The report as JSON in the one spelling of RFC 8785, which for these keys and integers is this.

    >>> canonical({"b": 1, "a": "x"})
    b'{"a":"x","b":1}'
    """
    return json.dumps(report, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
