"""What each module of a simulated step holds: how many bytes, in which interval of the step, and for how long.

A *part* is a module with all that is below it; what belongs to none is *outside*. An *interval* is the time that
the step spends in one part in one phase; what is outside counts to the interval before it. A planner puts a step
together from the intervals of others: bytes of parts add up, and the most at an interval is what its parts hold there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memscale.hardware import Hardware
from memscale.simulation.trace import OpCall, Phase, Times, Trace

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


def shares(trace: Trace, paths: Sequence[str]) -> Shares:
    """The `Shares` of the last step; a path inside another one counts apart from it."""
    begin, first_op = trace.steps[-1]
    owners = _Owners(paths)
    of_op = [owners.of(op.path) for op in trace.ops[first_op:]]
    rows = _rows(trace, owners, of_op, first_op, begin)
    kept = np.zeros(len(paths) + 1, dtype=np.int64)
    seconds = np.zeros(len(paths) + 1)
    first = np.full(len(paths) + 1, -1, dtype=np.int64)
    for at, (taken, part) in enumerate(zip(_op_seconds(trace), of_op, strict=True)):
        seconds[part] += taken
        if first[part] < 0:
            first[part] = at
    for number in _waiting(trace, begin):
        kept[rows[number]] += _size(trace.storages[number].nbytes, trace.hardware)
    return Shares(kept, seconds, first)


def _waiting(trace: Trace, begin: int) -> set[int]:
    """The storages that are alive when the last backward begins, without parameters and the like."""
    ops = trace.event_ops
    until = next((at for at in range(max(begin, 0), len(ops)) if _is_backward(trace, ops[at])), len(ops))
    alive = _alive(trace.events[:until])
    return {number for number in alive if trace.storages[number].category not in _RESIDENT}


def attribute(trace: Trace, paths: Sequence[str]) -> Attribution:
    """What the parts at `paths`, none of which is inside another, hold of the last step in `trace`.

    Args:
        trace: of a step; on a CUDA device what counts is the blocks that its allocator would hand out.
        paths: of modules.
    """
    begin, first_op = trace.steps[-1]
    owners = _Owners(paths)
    of_op = [owners.of(op.path) for op in trace.ops[first_op:]]
    intervals, interval_of_op = _intervals(trace.ops[first_op:], of_op)
    sizes = np.array([_size(each.nbytes, trace.hardware) for each in trace.storages], dtype=np.int64)
    rows = np.array(_rows(trace, owners, of_op, first_op, begin), dtype=np.int64)
    # A part's number is its row, and `OUTSIDE` the last one.
    parts = len(paths) + 1
    held, slack, handed = _held(
        _Events.of(trace, sizes, [interval_of_op[max(0, op - first_op)] for op in trace.event_ops[begin:]]),
        rows,
        np.array([owners.of(each.path) for each in trace.storages], dtype=np.int64),
        (parts, len(intervals)),
    )

    resident = {name: np.zeros(parts, dtype=np.int64) for name in _RESIDENT}
    born = {event - 1 for event in trace.events[begin:] if event > 0}
    for number in _alive(trace.events[:begin]) | born:
        if (category := trace.storages[number].category) in resident:
            resident[category][rows[number]] += sizes[number]
    kept = np.zeros(parts, dtype=np.int64)
    for number in _waiting(trace, begin):
        kept[rows[number]] += sizes[number]
    seconds = np.zeros((parts, len(_PHASES)))
    for op, taken, part in zip(trace.ops[first_op:], _op_seconds(trace), of_op, strict=True):
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
        waits_seconds=_waits(trace.times, of_op, first_op, parts),
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
    def of(cls, trace: Trace, sizes: Bytes, intervals: Sequence[int]) -> _Events:
        events = np.array(trace.events, dtype=np.int64)
        numbers = np.abs(events) - 1
        deltas = np.sign(events) * sizes[numbers] if len(events) else events
        return cls(numbers, deltas, trace.steps[-1][0], np.array([0, *intervals], dtype=np.int64))

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


def _waits(times: Times, of_op: Sequence[int], first_op: int, parts: int) -> npt.NDArray[np.float64]:
    """[part] how long the device stands still for what the part moves."""
    copies = {transfer.end: transfer for transfer in times.transfers}
    waits = np.zeros(parts)
    for stall in times.stalls:
        transfer = copies.get(stall.end)
        if transfer is None or stall.cause == "host" or stall.begin < times.steps[-1]:
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


class _Owners:
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


def _rows(trace: Trace, owners: _Owners, of_op: list[int], first_op: int, begin: int) -> list[int]:
    """The part that each storage counts to.

    What backward waited for counts to the part that let go of it: the input of a block is the output of the one before,
    and whether it is there for backward is the block's doing. Everything else counts to what made it.
    """
    rows = [owners.of(each.path) for each in trace.storages]
    for event, op in zip(trace.events[begin:], trace.event_ops[begin:], strict=True):
        if event > 0 or op < first_op or trace.ops[op].phase is not Phase.BACKWARD:
            continue
        record = trace.storages[-event - 1]
        if record.category not in _RESIDENT and record.op >= first_op:
            rows[-event - 1] = of_op[op - first_op]
    return rows


def _is_backward(trace: Trace, op: int) -> bool:
    return op >= 0 and trace.ops[op].phase is Phase.BACKWARD


def _op_seconds(trace: Trace) -> list[float]:
    """What each operator of the last step takes, with what the host takes to issue it; copies are not waited for.

    What the host itself computes beside a card takes as long as the card stands still for it.
    """
    first_op, on_host = trace.steps[-1][1], set(trace.times.on_host)
    found = [0.0 if at in on_host else op.seconds or 0.0 for at, op in enumerate(trace.last_operators, first_op)]
    for stall in trace.times.stalls:
        if found and stall.cause == "host" and stall.begin >= trace.times.steps[-1]:
            found[min(stall.op - first_op, len(found) - 1)] += stall.end - stall.begin  # behind the last one, too
    return found


def _size(nbytes: int, hardware: Hardware) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES if hardware.device_type == "cuda" else nbytes


def operators_of(trace: Trace, path: str) -> frozenset[str]:
    """Returns the names of the operators that the forward of the module at `path` runs, with those inside it.

    Of the whole model those inside it alone: its own are not known from the loss's.
    """
    inside = f"{path}."
    return frozenset(
        op.name
        for op in trace.last_operators
        if op.phase is Phase.FORWARD and (f"{op.path}.".startswith(inside) if path else op.path)
    )


def runs_of(trace: Trace, path: str) -> int:
    """Returns how often the forward of the module at `path` runs: as often as the rarest operator in it."""
    inside = f"{path}."
    found = Counter(
        (op.path, op.name)
        for op in trace.last_operators
        if op.phase is Phase.FORWARD and f"{op.path}.".startswith(inside)
    )
    return min(found.values(), default=0)


def turns_of(trace: Trace, path: str) -> int:
    """Returns how often the forward of the module at `path` begins behind another's, as a cell in a loop does."""
    inside = path and f"{path}."
    within = [f"{op.path}.".startswith(inside) for op in trace.last_operators if op.phase is Phase.FORWARD]
    return sum(now and not before for before, now in itertools.pairwise([False, *within]))


def given_bytes(trace: Trace, paths: Sequence[str]) -> list[int]:
    """Returns the bytes that each module at `paths`, which run one after the other, is given by those before it.

    That is the last that these made which is still there when the module begins; 0 if nothing is.
    """
    owners = _Owners(paths)
    begin, first_op = trace.steps[-1]
    firsts: dict[int, int] = {}
    for at, op in enumerate(trace.last_operators, first_op):
        if op.phase is Phase.FORWARD and (part := owners.of(op.path)) != OUTSIDE:
            firsts.setdefault(part, at)
    given = [0] * len(paths)
    waiting = sorted(((at, part) for part, at in firsts.items()), reverse=True)
    there: dict[int, None] = {}
    for event, now in zip(trace.events[begin:], trace.event_ops[begin:], strict=True):
        while waiting and now >= waiting[-1][0]:
            made = [trace.storages[number] for number in there]
            last = max((storage.op for storage in made), default=-1)
            # Beside its values an operator may give indices or statistics.
            given[waiting.pop()[1]] = max((storage.nbytes for storage in made if storage.op == last), default=0)
        number = abs(event) - 1
        storage = trace.storages[number]
        if event < 0:
            there.pop(number, None)
        elif "float" in storage.dtype and owners.of(storage.path) != OUTSIDE:
            there[number] = None
    return given
