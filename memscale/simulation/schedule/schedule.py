"""The schedule of a step as frozen data: the work of each queue, with its times.

`prefetch_depth` computes the number of copies in flight, in each direction, at which compute hides the copies.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memscale.hardware import COLLECTIVES
from memscale.simulation.schedule.clock import CAUSES
from memscale.simulation.trace import Phase, Trace, Transfer

#: The queues of a schedule, in the order in which pictures show them.
QUEUES = ("device", "streams", *COLLECTIVES, "out", "in", "disk", "host")


class ScheduledOperator(NamedTuple):
    """An operator with its times.

    Attributes:
        name, path, phase: the name, the module and the phase of the `OpCall`, such as ``"aten::mm"`` and ``"forward"``.
        queue: ``"device"``; ``"streams"`` for a stream other than the main one; ``"host"`` for work of the CPU.
        begin: seconds from the beginning of the step.
        seconds: the duration.
        issued: the time at which the host has issued the operator.
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
    """A collective among `size` processes: its kind (``"all-gather"``) and its total bytes."""

    kind: str
    nbytes: int
    size: int
    begin: float
    seconds: float


class ScheduledWait(NamedTuple):
    """A wait of the ``"device"`` or the ``"host"``; `Profile.exposed_seconds` lists the causes.

    `operator` is the number of the first operator after the wait.
    """

    queue: str
    cause: str
    begin: float
    seconds: float
    operator: int


@dataclass(frozen=True)
class Schedule:
    """The schedule of a step, in seconds from its beginning.

    Attributes:
        seconds: the time at which the next step begins; copies may end later.
        operators: the operators, in the order of issue.
        copies: the copies, in the order of their starts in each direction.
        waits: the waits of the device, and of the host for copies.
        collectives: the collectives, in the order of issue.
    """

    seconds: float
    operators: tuple[ScheduledOperator, ...]
    copies: tuple[ScheduledCopy, ...]
    waits: tuple[ScheduledWait, ...]
    collectives: tuple[ScheduledCollective, ...] = ()

    @property
    def utilisation(self) -> dict[str, float]:
        """Returns queue -> the share of the step in which the queue is busy; idle queues are left out.

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
        """Returns cause -> seconds that the device waits."""
        found = dict.fromkeys(CAUSES, 0.0)
        for wait in self.waits:
            if wait.queue == "device":
                found[wait.cause] += wait.seconds
        return {cause: seconds for cause, seconds in found.items() if seconds}

    @property
    def seconds_by_module(self) -> dict[str, float]:
        """Returns module path -> seconds of the device: the module's operators and the waits before these."""
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
        """Returns the schedule of the last step in `trace`."""
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
        """Returns the schedule as JSON data, with each name written once."""
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
        """Returns the schedule that `to_data` wrote."""
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
    """Returns the queues of a copy: the link's direction, and also the disk for a copy to or from the disk."""
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
        # `tuple.__new__` takes half the time of a call of the class.
        row = (op.name, op.path, names[op.phase], queue, begin - zero, seconds, issued - zero)
        yield tuple.__new__(ScheduledOperator, row)


def _waits(trace: Trace) -> Iterator[ScheduledWait]:
    zero, first = trace.times.steps[-1], trace.steps[-1][1]
    for queue, waits in (("device", trace.times.stalls), ("host", trace.times.held_up)):
        for begin, end, cause, op in waits:
            if begin >= zero:
                yield ScheduledWait(queue, cause, begin - zero, end - begin, op - first)


_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # tensors on their way back at once, by choice
# A depth is deep enough if every larger depth saves at most this share of the step, or at most this many copies for
# each unit of depth: these copies only move from the end of a pass into the next pass, at a cost in memory. By choice.
_WORTH = 0.01
_COPIES = 2


def prefetch_depth(
    seconds: Sequence[float], passes: Sequence[int], transfers: Sequence[Transfer], *, first: int
) -> int:
    """Returns the smallest `AsyncOffloadConfig.prefetch_depth` that hides the copies of a step as far as possible.

    The function replays the step as queues for each depth: the compute waits while more than `depth` copies out are in
    flight, and each copy in starts `depth` requests ahead of its use. Requests at one moment count as one.

    Args:
        seconds: [operator] the seconds of each operator.
        passes: [operator] the pass over the model that the operator belongs to; requests stay within a pass.
        transfers: the copies of the step.
        first: the number of the step's first operator.
    """
    before = [0.0, *itertools.accumulate(seconds)]
    by_op: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        if transfer.direction == "in" and transfer.awaited is not None:
            by_op.setdefault(min(transfer.awaited - first, len(seconds)), []).append(transfer)
    requests = sorted(by_op.items())
    of_pass = [passes[min(op, len(seconds) - 1)] for op, _ in requests]
    departures = [(max(0, each.requested - first), -1, each) for each in transfers if each.direction == "out"]
    # At equal moments copies out come first, as in the engine's order of stash and fetch.
    moments: list[tuple[int, int, Transfer | None]] = sorted(
        [*departures, *((op, number, None) for number, (op, _) in enumerate(requests))], key=lambda moment: moment[:2]
    )

    def replayed(depth: int) -> float:
        """Returns the seconds of the step with this depth."""
        ends = {"out": 0.0, "in": 0.0, "disk": 0.0}
        stood_still = 0.0
        leaving: deque[float] = deque()
        arrivals: list[float] = []
        for op, number, departure in moments:
            now = before[op] + stood_still
            if departure is not None:
                leaving.append(_copied(departure, now, ends))
                if len(leaving) > depth:
                    stood_still += max(0.0, leaving.popleft() - now)
                continue
            for ahead in range(len(arrivals), min(number + depth + 1, len(requests))):
                if of_pass[ahead] != of_pass[number]:
                    break
                arrivals.append(max([_copied(each, now, ends) for each in requests[ahead][1]]))
            stood_still += max(0.0, arrivals[number] - now)
        return before[-1] + stood_still

    took = {depth: replayed(depth) for depth in _DEPTHS}
    copy_seconds = sum(transfer.end - transfer.begin for transfer in transfers) / len(transfers)

    def is_deep_enough(depth: int) -> bool:
        return all(
            took[depth] - took[deeper] <= max(_WORTH * took[depth], _COPIES * (deeper - depth) * copy_seconds)
            for deeper in _DEPTHS
            if deeper > depth
        )

    return next(filter(is_deep_enough, _DEPTHS))


def _copied(transfer: Transfer, now: float, ends: dict[str, float]) -> float:
    """Returns the end of a copy that is requested now."""
    queues = [transfer.direction, "disk"] if transfer.tier == "disk" else [transfer.direction]
    end = max(now, *(ends[queue] for queue in queues)) + transfer.end - transfer.begin
    for queue in queues:
        ends[queue] = end
    return end
