"""A step's schedule as frozen data: what each queue does, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memscale.hardware import COLLECTIVES
from memscale.simulation.schedule.clock import CAUSES
from memscale.simulation.trace import Phase, Trace

#: The queues of a schedule, in the order in which pictures show them.
QUEUES = ("device", "streams", *COLLECTIVES, "out", "in", "disk", "host")


class ScheduledOperator(NamedTuple):
    """An operator: what it is and where it was called, as of `OpCall`, and when it runs.

    Attributes:
        name, path, phase: ``"aten::mm"``, the module, ``"forward"``.
        queue: ``"device"``, ``"streams"`` for one beside the main stream of that, or ``"host"`` where the CPU beside
            the device computes.
        begin: in seconds from the beginning of the step.
        seconds: how long it takes.
        issued: when the host had handed it over.
    """

    name: str
    path: str
    phase: str
    queue: str
    begin: float
    seconds: float
    issued: float


class ScheduledCopy(NamedTuple):
    """A copy from the device (``"out"``) to `tier`, or back (``"in"``)."""

    direction: str
    tier: str
    nbytes: int
    begin: float
    seconds: float


class ScheduledCollective(NamedTuple):
    """A collective among `size` processes: what it is (``"all-gather"``), and how large as a whole."""

    kind: str
    nbytes: int
    size: int
    begin: float
    seconds: float


class ScheduledWait(NamedTuple):
    """The ``"device"`` or the ``"host"`` stands still; see `Profile.exposed_seconds` for the causes.

    `operator` is the number of the first one after it.
    """

    queue: str
    cause: str
    begin: float
    seconds: float
    operator: int


@dataclass(frozen=True)
class Schedule:
    """When everything in a step happens, in seconds from its beginning.

    Attributes:
        seconds: until the next step begins. Copies may go on beyond.
        operators: in the order in which they are issued.
        copies: in the order in which they start in their direction.
        waits: of the device, and of the host for copies.
        collectives: in the order in which they are issued.
    """

    seconds: float
    operators: tuple[ScheduledOperator, ...]
    copies: tuple[ScheduledCopy, ...]
    waits: tuple[ScheduledWait, ...]
    collectives: tuple[ScheduledCollective, ...] = ()

    @property
    def utilisation(self) -> dict[str, float]:
        """The share of the step in which each queue is busy; without those that do nothing in it.

        >>> copies = (ScheduledCopy("out", "pinned", 8, 0.0, 0.5), ScheduledCopy("in", "pinned", 8, 1.75, 0.5))
        >>> Schedule(2.0, (), copies, ()).utilisation
        {'out': 0.25, 'in': 0.125}
        """
        busy = dict.fromkeys(QUEUES, 0.0)
        for operator in self.operators:
            busy[operator.queue] += operator.seconds
        for copy in self.copies:
            seconds = max(0.0, min(self.seconds, copy.begin + copy.seconds) - copy.begin)
            for queue in queues_of(copy):
                busy[queue] += seconds
        for each in self.collectives:
            busy[each.kind] += max(0.0, min(self.seconds, each.begin + each.seconds) - each.begin)
        return {queue: seconds / self.seconds for queue, seconds in busy.items() if seconds and self.seconds}

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """Cause -> seconds that the device waits."""
        found = dict.fromkeys(CAUSES, 0.0)
        for wait in self.waits:
            if wait.queue == "device":
                found[wait.cause] += wait.seconds
        return {cause: seconds for cause, seconds in found.items() if seconds}

    @property
    def seconds_by_module(self) -> dict[str, float]:
        """The step by module path: what the device computes, and what it waits for before."""
        found: dict[str, float] = defaultdict(float)
        for operator in self.operators:
            if operator.queue == "device":
                found[operator.path] += operator.seconds
        for wait in self.waits:
            if wait.queue == "device":
                is_last = wait.operator == len(self.operators)
                found["" if is_last else self.operators[wait.operator].path] += wait.seconds
        return dict(sorted(found.items()))

    @classmethod
    def of_last_step(cls, trace: Trace) -> Schedule:
        """The schedule of the last step in `trace`."""
        times, zero = trace.times, trace.times.steps[-1]
        return cls(
            times.end - zero,
            tuple(_operations(trace)),
            tuple(
                ScheduledCopy(each.direction, each.tier, each.nbytes, each.begin - zero, each.end - each.begin)
                for each in times.transfers
                if each.begin >= zero
            ),
            tuple(_waits(trace)),
            tuple(
                ScheduledCollective(each.kind, each.nbytes, each.size, each.begin - zero, each.end - each.begin)
                for each in times.collectives
                if each.begin >= zero
            ),
        )

    def to_data(self) -> dict[str, Any]:
        """The schedule as what JSON can hold; names are written once."""
        names: dict[str, int] = {}

        def coded(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
            return [
                [names.setdefault(cell, len(names)) if isinstance(cell, str) else cell for cell in row] for row in rows
            ]

        rows = {"operators": coded(self.operators), "copies": coded(self.copies), "waits": coded(self.waits)}
        rows["collectives"] = coded(self.collectives)
        return {"seconds": self.seconds, "names": list(names), **rows}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that `to_data` wrote."""
        names = data["names"]

        def texts(rows: Sequence[Sequence[Any]], columns: int, *, at: int = 0) -> Iterator[list[Any]]:
            for row in rows:
                yield [*row[:at], *(names[cell] for cell in row[at : at + columns]), *row[at + columns :]]

        return cls(
            data["seconds"],
            tuple(ScheduledOperator(*row) for row in texts(data["operators"], 4)),
            tuple(ScheduledCopy(*row) for row in texts(data["copies"], 2)),
            tuple(ScheduledWait(*row) for row in texts(data["waits"], 2)),
            tuple(ScheduledCollective(*row) for row in texts(data.get("collectives", ()), 1)),
        )


def queues_of(copy: ScheduledCopy) -> tuple[str, ...]:
    """The queues that a copy is in: of the link, of the disk, or of both where an accelerator's bytes go to disk."""
    return (copy.direction, "disk") if copy.tier == "disk" else (copy.direction,)


def _operations(trace: Trace) -> Iterator[ScheduledOperator]:
    names = {phase: phase.value for phase in Phase}
    times, zero, first = trace.times, trace.times.steps[-1], trace.steps[-1][1]
    on_streams, on_host = {at: span for at, *span in times.on_streams}, set(times.on_host)
    for at, op in enumerate(trace.last_operators, first):
        begin, issued = times.begins[at], times.issued[at]
        seconds = times.ends[at] - begin
        queue = "device"
        if at in on_streams:
            begin, end = on_streams[at]
            queue, seconds = "streams", end - begin
        elif at in on_host:
            assert op.seconds is not None
            queue, seconds, begin = "host", op.seconds, issued - op.seconds
        # Half the time of calling the class.
        row = (op.name, op.path, names[op.phase], queue, begin - zero, seconds, issued - zero)
        yield tuple.__new__(ScheduledOperator, row)


def _waits(trace: Trace) -> Iterator[ScheduledWait]:
    zero, first = trace.times.steps[-1], trace.steps[-1][1]
    for queue, waits in (("device", trace.times.stalls), ("host", trace.times.held_up)):
        for begin, end, cause, op in waits:
            if begin >= zero:
                yield ScheduledWait(queue, cause, begin - zero, end - begin, op - first)
