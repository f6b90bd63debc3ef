"""Which bytes of the tiers were read and written, and at which point of which stream: what `hazards` compares."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from memscale.runtime.backends.protocol import Event

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` come after `other`, in place."""
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


@dataclasses.dataclass(frozen=True, eq=False)
class Access:
    """Bytes that a stream read or wrote."""

    kind: Literal["read", "write"]
    start: int
    stop: int
    stream: str
    time: int
    site: str
    event: Event | None = None

    def before(self, clock: Clock) -> bool:
        """Whether what has that clock comes after the access on every schedule."""
        return clock.get(self.stream, 0) >= self.time

    def covers(self, other: Access, clock: Clock) -> bool:
        """Whether all that comes after this access, made at `clock`, comes after `other` too, which is of its kind."""
        same_bytes = (self.start, self.stop) == (other.start, other.stop)
        return self.kind == other.kind and same_bytes and other.before(clock)


class Accesses:
    """What was done to the bytes of some spaces, as far as it can still be in somebody's way.

    >>> accesses = Accesses()
    >>> accesses.add("pinned", Access("read", 0, 8, "in", 1, "here"), {"in": 1})
    >>> accesses.add("pinned", Access("read", 0, 8, "in", 2, "there"), {"in": 2})
    >>> [access.site for access in accesses.at("pinned", 4, 12)]
    ['there']
    """

    def __init__(self) -> None:
        self._spaces: dict[Any, list[Access]] = {}

    def at(self, space: Any, start: int, stop: int) -> list[Access]:
        """The accesses to some of these bytes."""
        return [access for access in self._spaces.get(space, []) if access.start < stop and start < access.stop]

    def forget(self, space: Any, start: int, stop: int) -> None:
        """What was done to these bytes is over, or what is done to them now comes after it."""
        gone = set(self.at(space, start, stop))
        self._spaces[space] = [access for access in self._spaces.get(space, []) if access not in gone]

    def add(self, space: Any, access: Access, clock: Clock) -> None:
        """Remember an access that was made at `clock`.

        A parameter is read again and again and written by no copy, so the reads before this one must not pile up.
        """
        kept = [other for other in self._spaces.get(space, []) if not access.covers(other, clock)]
        self._spaces[space] = [*kept, access]
