"""Attribution of a trace to modules: the bytes that each part holds at each interval of the step, and its seconds.

A *part* is a module with all modules inside it; *outside* is a pseudo-part for storages and operators of no part. An
*interval* is the time that the step spends in one part in one phase; operators outside have intervals of their own,
named after the part before them. A planner estimates a step from the intervals of other steps: the peak at an interval
is at most the sum of the bytes that the parts hold there.
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

#: The part number of storages and operators that belong to no part.
OUTSIDE = -1

_RESIDENT = ("parameter", "buffer", "optimizer state", "gradient")
_BLOCK_BYTES = 512  # CUDA's caching allocator hands out multiples of it
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """An interval of the step: its phase and part, and whether it lies after that part and before the next one."""

    phase: Phase
    part: int
    outside: bool


@dataclass(frozen=True)
class Attribution:
    """The bytes that each part holds at each interval of a step, and its seconds. The last row is outside.

    Attributes:
        intervals: the intervals, in the order in which the step first reaches them.
        held_bytes: [part, interval] the most bytes that the part holds at the interval.
        slack_bytes: [interval] the sum of `held_bytes` over the parts, minus the most bytes that are held at once.
        states_bytes: [part] the bytes of optimizer states of its parameters.
        gradients_bytes: [part] the bytes of gradients of its parameters.
        parameters_bytes: [part] the bytes of its parameters on the device.
        kept_bytes: [part] the bytes alive when backward begins, without parameters, buffers, states and gradients.
        seconds: [part, phase] the seconds of its operators, in the order forward, backward, optimizer.
        waits_seconds: [part] the seconds that the device waits for the part's copies.
        handed_bytes: (holder, maker) -> [interval] the most bytes that part `holder` holds of storages that part
            `maker` made.
        output_bytes: [part] the bytes of its output, the input of another part, that the part keeps for its backward.
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
    output_bytes: Bytes


@dataclass(frozen=True)
class Shares:
    """The bytes and seconds of the parts of a step, in the order of their paths; the last entry is outside.

    Attributes:
        kept_bytes: the bytes alive when backward begins, without parameters, buffers, states and gradients.
        seconds: the seconds of the part's operators.
        first: the index in the step of the part's first operator; -1 for a part without operators.
    """

    kept_bytes: Bytes
    seconds: npt.NDArray[np.float64]
    first: npt.NDArray[np.int64]


def shares(trace: Trace, paths: Sequence[str]) -> Shares:
    """Returns the `Shares` of the last step; a part inside another part counts for itself only."""
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
    """Returns the storages alive when backward begins, without parameters, buffers, states and gradients."""
    ops = trace.event_ops
    until = next((at for at in range(max(begin, 0), len(ops)) if _is_backward(trace, ops[at])), len(ops))
    alive = _alive(trace.events[:until])
    return {number for number in alive if trace.storages[number].category not in _RESIDENT}


def attribute(trace: Trace, paths: Sequence[str]) -> Attribution:
    """Returns the `Attribution` of the last step in `trace` to the parts at `paths`.

    Args:
        trace: the trace of a step; on CUDA each storage counts with its bytes rounded up to blocks of 512.
        paths: the paths of modules, none inside another.
    """
    begin, first_op = trace.steps[-1]
    owners = _Owners(paths)
    of_op = [owners.of(op.path) for op in trace.ops[first_op:]]
    intervals, interval_of_op = _intervals(trace.ops[first_op:], of_op)
    sizes = np.array([_size(each.nbytes, trace.hardware) for each in trace.storages], dtype=np.int64)
    rows = np.array(_rows(trace, owners, of_op, first_op, begin), dtype=np.int64)
    # The number of a part is its row; `OUTSIDE` (-1) is the last row.
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
    waiting = _waiting(trace, begin)
    for number in waiting:
        kept[rows[number]] += sizes[number]
    output = np.zeros(parts, dtype=np.int64)
    for number in {each for each in _inputs(trace, owners, len(paths)) if each is not None} & waiting:
        if rows[number] == (maker := owners.of(trace.storages[number].path)):
            output[maker] += sizes[number]
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
        output_bytes=output,
    )


def _intervals(ops: Sequence[OpCall], of_op: Sequence[int]) -> tuple[tuple[Interval, ...], list[int]]:
    """Returns the intervals of a step (at least one), and the index of each operator's interval."""
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
    """Births and deaths of storages, those before the last step and those within it.

    Attributes:
        numbers: [event] the number of the storage.
        deltas: [event] the change in bytes, below 0 for a death.
        begin: the index of the first event of the step.
        intervals: [1 + events of the step] the interval before the step's first event, then at each event.
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
        """Returns the bytes held, [row, 1 + events of the step], where event i changes row ``rows[i]`` of `count`."""
        levels = np.zeros((count, len(self.numbers) - self.begin + 1), dtype=np.int64)
        np.add.at(levels[:, 0], rows[: self.begin], self.deltas[: self.begin])
        levels[rows[self.begin :], np.arange(1, levels.shape[1])] = self.deltas[self.begin :]
        return levels.cumsum(axis=1)


def _held(
    events: _Events, rows: npt.NDArray[np.int64], makers: npt.NDArray[np.int64], shape: tuple[int, int]
) -> tuple[Bytes, Bytes, dict[tuple[int, int], Bytes]]:
    """Returns ``held_bytes``, ``slack_bytes`` and ``handed_bytes`` of an `Attribution`.

    Args:
        events: the births and deaths of storages.
        rows: [storage] the part that holds the storage.
        makers: [storage] the part that made the storage.
        shape: the numbers of parts and of intervals.
    """
    parts, intervals = shape
    starts = np.flatnonzero(np.diff(events.intervals, prepend=-1))  # first index of each run of events at one interval
    runs = events.intervals[starts]

    def most(levels: Bytes) -> Bytes:
        """Returns the maximum over the events of each interval: [..., event] -> [..., interval]."""
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
    """Returns [part] the seconds that the device waits for the part's copies."""
    copies = {transfer.end: transfer for transfer in times.transfers}
    waits = np.zeros(parts)
    for stall in times.stalls:
        transfer = copies.get(stall.end)
        if transfer is None or stall.cause == "host" or stall.begin < times.steps[-1]:
            continue
        # A wait for a copy out is charged to the part that started the copy: another part may need the freed memory.
        at = (stall.op if transfer.direction == "in" else transfer.requested - 1) - first_op
        waits[of_op[min(max(at, 0), len(of_op) - 1)] if of_op else OUTSIDE] += stall.end - stall.begin
    return waits


def _alive(events: Sequence[int]) -> set[int]:
    """Returns the numbers of the storages that are alive after `events`."""
    alive: set[int] = set()
    for event in events:
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
    return alive


class _Owners:
    """A lookup from module and parameter paths to part numbers."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._known: dict[str, int] = {}

    def of(self, path: str) -> int:
        """Returns the number of the part that holds the module or parameter at `path`; `OUTSIDE` if no part does."""
        if path not in self._known:
            head = path
            while head and head not in self._numbers:
                head = head.rpartition(".")[0]
            self._known[path] = self._numbers.get(head, OUTSIDE) if head else self._numbers.get("", OUTSIDE)
        return self._known[path]


def _rows(trace: Trace, owners: _Owners, of_op: list[int], first_op: int, begin: int) -> list[int]:
    """Returns [storage] the part that the storage counts to.

    A storage freed in backward counts to the part whose operator freed it: a block's input is the output of the block
    before it, and it is alive in backward because this block saved it. Other storages count to the part that made them.
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
    """Returns the seconds of each operator of the last step, plus the device's waits for the host, without copies.

    An operator that runs on the host of a card counts only with the seconds that the card waits for it.
    """
    first_op, on_host = trace.steps[-1][1], set(trace.times.on_host)
    found = [0.0 if at in on_host else op.seconds or 0.0 for at, op in enumerate(trace.last_operators, first_op)]
    for stall in trace.times.stalls:
        if found and stall.cause == "host" and stall.begin >= trace.times.steps[-1]:
            # A stall after the last operator counts to the last operator.
            found[min(stall.op - first_op, len(found) - 1)] += stall.end - stall.begin
    return found


def _size(nbytes: int, hardware: Hardware) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES if hardware.device_type == "cuda" else nbytes


def operators_of(trace: Trace, path: str) -> frozenset[str]:
    """Returns the names of the operators that the forward of the module at `path` runs, modules inside it included.

    For the whole model (``""``) only operators inside its submodules count: operators at the root may be the loss's.
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
    """Returns how often the step enters the forward of the module at `path` from outside it, as a cell in a loop."""
    inside = path and f"{path}."
    within = [f"{op.path}.".startswith(inside) for op in trace.last_operators if op.phase is Phase.FORWARD]
    return sum(now and not before for before, now in itertools.pairwise([False, *within]))


def given_bytes(trace: Trace, paths: Sequence[str]) -> list[int]:
    """Returns, for each module at `paths`, the bytes of its input from another of these modules; 0 without one."""
    inputs = _inputs(trace, _Owners(paths), len(paths))
    return [0 if number is None else trace.storages[number].nbytes for number in inputs]


def _inputs(trace: Trace, owners: _Owners, parts: int) -> list[int | None]:
    """Returns [part] the number of the storage of the part's input from another part; None without one.

    The input is taken to be the most recent floating-point storage of any part that is alive when the part begins.
    """
    begin, first_op = trace.steps[-1]
    firsts: dict[int, int] = {}
    for at, op in enumerate(trace.last_operators, first_op):
        if op.phase is Phase.FORWARD and (part := owners.of(op.path)) != OUTSIDE:
            firsts.setdefault(part, at)
    inputs: list[int | None] = [None] * parts
    waiting = sorted(((at, part) for part, at in firsts.items()), reverse=True)
    alive: dict[int, None] = {}
    for event, now in zip(trace.events[begin:], trace.event_ops[begin:], strict=True):
        while waiting and now >= waiting[-1][0]:
            last = max((trace.storages[number].op for number in alive), default=-1)
            # The largest result is the value: an operator may return indices or statistics besides.
            made = (number for number in alive if trace.storages[number].op == last)
            inputs[waiting.pop()[1]] = max(made, key=lambda number: trace.storages[number].nbytes, default=None)
        number = abs(event) - 1
        storage = trace.storages[number]
        if event < 0:
            alive.pop(number, None)
        elif "float" in storage.dtype and owners.of(storage.path) != OUTSIDE:
            alive[number] = None
    return inputs
