"""What each module of a simulated step holds: how many bytes, in which interval of the step, and for how long.

A *part* is a module with all that is below it; what belongs to none is *outside*. An *interval* is the time that
the step spends in one part in one phase; what is outside counts to the interval before it. A planner puts a step
together from the intervals of others: bytes of parts add up, and the most at an interval is what its parts hold there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memscale.hardware import Hardware
from memscale.simulation.ledger import Ledger, OpCall, Phase
from memscale.simulation.schedule.clock import Clock

#: The number that stands for what no part holds.
OUTSIDE = -1

_RESIDENT = ("parameter", "buffer", "optimizer state", "gradient")
_BLOCK_BYTES = 512  # CUDA's caching allocator hands out multiples of it
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """Where the step is: in which phase and part, or after that part and before the next (`outside`)."""

    phase: Phase
    part: int
    outside: bool


@dataclass(frozen=True)
class Attribution:
    """What each part holds at each interval of a step. The last row of each table is what is outside.

    Attributes:
        intervals: in the order in which the step comes to them first.
        held_bytes: [part, interval] the most that the part holds at the interval.
        slack_bytes: [interval] by how much the sum of these is above the most that is held at once.
        states_bytes: [part] optimizer states of its parameters.
        gradients_bytes: [part] the most that gradients of its parameters take.
        parameters_bytes: [part] its parameters on the device.
        kept_bytes: [part] what waits for backward when backward begins, without parameters and the like.
        seconds: [part, phase] the time of its operators, in the order forward, backward, optimizer.
        waits_seconds: [part] how long the device stands still for what the part moves.
        handed_bytes: by (holder, maker), two rows: [interval] the most that the first holds of what the second made.
    """

    intervals: tuple[Interval, ...]
    held_bytes: Bytes
    slack_bytes: Bytes
    states_bytes: Bytes
    gradients_bytes: Bytes
    parameters_bytes: Bytes
    kept_bytes: Bytes
    seconds: npt.NDArray[np.float64]
    waits_seconds: npt.NDArray[np.float64]
    handed_bytes: Mapping[tuple[int, int], Bytes]


@dataclass(frozen=True)
class Shares:
    """What parts have of a step, in the order of their paths; the last number is what is outside.

    Attributes:
        kept_bytes: what waits for backward when backward begins, without parameters and the like.
        seconds: the time of the operators.
        first: when the step comes to the part first, as the number of an operator; -1 if it never does.
    """

    kept_bytes: Bytes
    seconds: npt.NDArray[np.float64]
    first: npt.NDArray[np.int64]


def shares(ledger: Ledger, clock: Clock, paths: Sequence[str]) -> Shares:
    """The `Shares` of the last step; a path inside another one counts apart from it."""
    begin, first_op = ledger.steps[-1]
    owners = Owners(paths)
    of_op = [owners.of(op.path) for op in ledger.ops[first_op:]]
    rows = _rows(ledger, owners, of_op, first_op, begin)
    kept = np.zeros(len(paths) + 1, dtype=np.int64)
    seconds = np.zeros(len(paths) + 1)
    first = np.full(len(paths) + 1, -1, dtype=np.int64)
    for at, (taken, part) in enumerate(zip(_op_seconds(ledger, clock), of_op, strict=True)):
        seconds[part] += taken
        if first[part] < 0:
            first[part] = at
    for number in _waiting(ledger, begin):
        kept[rows[number]] += _size(ledger.records[number].nbytes, clock.hardware)
    return Shares(kept, seconds, first)


def _waiting(ledger: Ledger, begin: int) -> set[int]:
    """The storages that are alive when the last backward begins, without parameters and the like."""
    ops = ledger.event_ops
    until = next((at for at in range(max(begin, 0), len(ops)) if _is_backward(ledger, ops[at])), len(ops))
    alive = _alive(ledger.events[:until])
    return {number for number in alive if ledger.records[number].category not in _RESIDENT}


def attribute(ledger: Ledger, clock: Clock, paths: Sequence[str]) -> Attribution:
    """What the parts at `paths`, none of which is inside another, hold of the last step in `ledger`.

    Args:
        ledger: with `add_in_place` done.
        clock: when its operators ran; on a CUDA device what counts is the blocks that its allocator would hand out.
        paths: of modules.
    """
    begin, first_op = ledger.steps[-1]
    owners = Owners(paths)
    of_op = [owners.of(op.path) for op in ledger.ops[first_op:]]
    intervals, interval_of_op = _intervals(ledger.ops[first_op:], of_op)
    sizes = np.array([_size(record.nbytes, clock.hardware) for record in ledger.records], dtype=np.int64)
    rows = np.array(_rows(ledger, owners, of_op, first_op, begin), dtype=np.int64)
    # A part's number is its row, and `OUTSIDE` the last one.
    parts = len(paths) + 1
    held, slack, handed = _held(
        _Events.of(ledger, sizes, [interval_of_op[max(0, op - first_op)] for op in ledger.event_ops[begin:]]),
        rows,
        np.array([owners.of(record.path) for record in ledger.records], dtype=np.int64),
        (parts, len(intervals)),
    )

    resident = {name: np.zeros(parts, dtype=np.int64) for name in _RESIDENT}
    born = {event - 1 for event in ledger.events[begin:] if event > 0}
    for number in _alive(ledger.events[:begin]) | born:
        if (category := ledger.records[number].category) in resident:
            resident[category][rows[number]] += sizes[number]
    kept = np.zeros(parts, dtype=np.int64)
    for number in _waiting(ledger, begin):
        kept[rows[number]] += sizes[number]
    seconds = np.zeros((parts, len(_PHASES)))
    for op, taken, part in zip(ledger.ops[first_op:], _op_seconds(ledger, clock), of_op, strict=True):
        seconds[part, _PHASES.index(op.phase)] += taken
    return Attribution(
        intervals=intervals,
        held_bytes=held,
        slack_bytes=slack,
        states_bytes=resident["optimizer state"],
        gradients_bytes=resident["gradient"],
        parameters_bytes=resident["parameter"],
        kept_bytes=kept,
        seconds=seconds,
        waits_seconds=_waits(clock, of_op, first_op, parts),
        handed_bytes=handed,
    )


def _intervals(ops: Sequence[OpCall], of_op: Sequence[int]) -> tuple[tuple[Interval, ...], list[int]]:
    """The intervals of a step, and which of them each operator is at; there is one at least."""
    intervals: dict[Interval, int] = {}
    interval_of: list[int] = []
    last = (Phase.FORWARD, OUTSIDE)
    for op, part in zip(ops, of_op, strict=True):
        if part != OUTSIDE:
            last = (op.phase, part)
        elif op.phase is not last[0]:
            last = (op.phase, OUTSIDE)
        interval_of.append(intervals.setdefault(Interval(*last, part == OUTSIDE), len(intervals)))
    return tuple(intervals) or (Interval(Phase.FORWARD, OUTSIDE, True),), interval_of or [0]


class _Events(NamedTuple):
    """Births and deaths of storages, each with a number of bytes, the second half of them within the step.

    Attributes:
        numbers: of the storages.
        deltas: the bytes that come, or go where below 0.
        begin: the first one of the step.
        intervals: [1 + events of the step] where the step is before the first of them, and at each.
    """

    numbers: npt.NDArray[np.int64]
    deltas: Bytes
    begin: int
    intervals: npt.NDArray[np.int64]

    @classmethod
    def of(cls, ledger: Ledger, sizes: Bytes, intervals: Sequence[int]) -> _Events:
        events = np.array(ledger.events, dtype=np.int64)
        numbers = np.abs(events) - 1
        deltas = np.sign(events) * sizes[numbers] if len(events) else events
        return cls(numbers, deltas, ledger.steps[-1][0], np.array([0, *intervals], dtype=np.int64))

    def levels(self, rows: npt.NDArray[np.int64], count: int) -> Bytes:
        """[row, 1 + events of the step] what is held by each of `count` rows, each event being on one."""
        levels = np.zeros((count, len(self.numbers) - self.begin + 1), dtype=np.int64)
        np.add.at(levels[:, 0], rows[: self.begin], self.deltas[: self.begin])
        levels[rows[self.begin :], np.arange(1, levels.shape[1])] = self.deltas[self.begin :]
        return levels.cumsum(axis=1)


def _held(
    events: _Events, rows: npt.NDArray[np.int64], makers: npt.NDArray[np.int64], shape: tuple[int, int]
) -> tuple[Bytes, Bytes, dict[tuple[int, int], Bytes]]:
    """What `Attribution` calls ``held_bytes``, ``slack_bytes`` and ``handed_bytes``.

    Args:
        events: the births and deaths.
        rows: the part that each storage counts to.
        makers: the part that made it.
        shape: how many parts and intervals there are.
    """
    parts, intervals = shape
    starts = np.flatnonzero(np.diff(events.intervals, prepend=-1))  # of the runs of events at one interval
    runs = events.intervals[starts]

    def most(levels: Bytes) -> Bytes:
        """[..., interval] the most of [..., event]."""
        found = np.zeros((*levels.shape[:-1], intervals), dtype=np.int64)
        np.maximum.at(found.T, runs, np.maximum.reduceat(levels, starts, axis=-1).T)
        return found

    holders, made_by = (each[events.numbers] % parts for each in (rows, makers))
    levels = events.levels(holders, parts)
    held = most(levels)
    slack = held.sum(axis=0) - most(levels.sum(axis=0))
    handed: dict[tuple[int, int], Bytes] = {}
    strangers = np.flatnonzero(holders != made_by)
    for holder, maker in sorted({(int(holders[at]), int(made_by[at])) for at in strangers}):
        theirs = strangers[(holders[strangers] == holder) & (made_by[strangers] == maker)]
        level = np.zeros(levels.shape[1], dtype=np.int64)
        np.add.at(level, np.maximum(0, theirs - events.begin + 1), events.deltas[theirs])
        handed[holder, maker] = most(level.cumsum())
    return held, slack, handed


def _waits(clock: Clock, of_op: Sequence[int], first_op: int, parts: int) -> npt.NDArray[np.float64]:
    """[part] how long the device stands still for what the part moves."""
    copies = {transfer.end: transfer for transfer in clock.transfers}
    waits = np.zeros(parts)
    for stall in clock.stalls:
        transfer = copies.get(stall.end)
        if transfer is None or stall.cause == "host" or stall.begin < clock.steps[-1]:
            continue
        # Who waits for memory that is to be used again need not be who sent away what is in it.
        at = (stall.op if transfer.direction == "in" else transfer.asked - 1) - first_op
        waits[of_op[min(max(at, 0), len(of_op) - 1)] if of_op else OUTSIDE] += stall.end - stall.begin
    return waits


def _alive(events: Sequence[int]) -> set[int]:
    """The storages that are alive after these events."""
    alive: set[int] = set()
    for event in events:
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
    return alive


class Owners:
    """Which part a path belongs to."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._known: dict[str, int] = {}

    def of(self, path: str) -> int:
        """The number of the part that holds the module or parameter at `path`; `OUTSIDE` without one."""
        if path not in self._known:
            head = path
            while head and head not in self._numbers:
                head = head.rpartition(".")[0]
            self._known[path] = self._numbers.get(head, OUTSIDE) if head else self._numbers.get("", OUTSIDE)
        return self._known[path]


def _rows(ledger: Ledger, owners: Owners, of_op: list[int], first_op: int, begin: int) -> list[int]:
    """The part that each storage counts to.

    What backward waited for counts to the part that let go of it: the input of a block is the output of the one before,
    and whether it is there for backward is the block's doing. Everything else counts to what made it.
    """
    rows = [owners.of(record.path) for record in ledger.records]
    for event, op in zip(ledger.events[begin:], ledger.event_ops[begin:], strict=True):
        if event > 0 or op < first_op or ledger.ops[op].phase is not Phase.BACKWARD:
            continue
        record = ledger.records[-event - 1]
        if record.category not in _RESIDENT and record.op >= first_op:
            rows[-event - 1] = of_op[op - first_op]
    return rows


def _is_backward(ledger: Ledger, op: int) -> bool:
    return op >= 0 and ledger.ops[op].phase is Phase.BACKWARD


def _op_seconds(ledger: Ledger, clock: Clock) -> list[float]:
    """What each operator of the last step takes, with what the host takes to issue it; copies are not waited for.

    What the host itself computes beside a card takes as long as the card stands still for it.
    """
    first_op = ledger.steps[-1][1]
    found = [0.0 if at in clock.on_host else op.seconds or 0.0 for at, op in enumerate(ledger.ops[first_op:], first_op)]
    for stall in clock.stalls:
        if found and stall.cause == "host" and stall.begin >= clock.steps[-1]:
            found[min(stall.op - first_op, len(found) - 1)] += stall.end - stall.begin  # behind the last one, too
    return found


def _size(nbytes: int, hardware: Hardware) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES if hardware.device_type == "cuda" else nbytes
