"""`Trace`: the events of a simulated step, as immutable data. Every result about a step is a function of its trace."""

from __future__ import annotations

import enum
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from memscale.core import ConfigError, Document, aligned, format_bytes, format_seconds
from memscale.hardware import Direction, Hardware, Work

#: What a storage is for, in the order in which tables and pictures stack it; last what blocks of the caching allocator
#: have above the storages in them.
CATEGORIES = (
    "parameter",
    "buffer",
    "optimizer state",
    "gradient",
    "input",
    "activation",
    "temporary",
    "workspace",
    "other",
    "rounding",
)

_DOCUMENT = Document("trace", version=1, writer="Trace.to_json()", error=ConfigError)
_SHOWN = 40  # operators of a printed trace


class Phase(str, enum.Enum):
    """The phase of a step in which an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Storage(NamedTuple):
    """A storage of a trace.

    Attributes:
        nbytes: the bytes of the storage on the device.
        op: the index of the operator that made the storage; -1 if it lived before the first step.
        category: a member of `CATEGORIES`.
        shape: the shape of the first tensor over the storage.
        dtype: the dtype of that tensor, as ``"float32"``.
        path: the path of the module or parameter that the storage belongs to.
        offloaded: whether the storage is on another memory tier, and takes no bytes of the device.
        stream: the number of the stream that allocated the storage; 0 is the step's main stream.
    """

    nbytes: int
    op: int
    category: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    path: str = ""
    offloaded: bool = False
    stream: int = 0


class OpCall(NamedTuple):
    """A call of an operator in a trace.

    Attributes:
        name: the name of the operator, as ``"aten::mm"``.
        path: the path of the module that called the operator; in backward, of the module whose forward it belongs to.
        phase: the phase of the step.
        flops: the FLOPs of the call.
        nbytes: the bytes of its memory traffic.
        dtype: the dtype in which it computes.
        seconds: the seconds of the call on the device, or on the host if the host computes it; None if the speed is
            unknown.
    """

    name: str
    path: str
    phase: Phase
    flops: int = 0
    nbytes: int = 0
    dtype: str = ""
    seconds: float | None = None


class Stall(NamedTuple):
    """A wait of the device, or of the host, from `begin` to `end` in seconds, before operator number `op`."""

    begin: float
    end: float
    cause: str
    op: int


class Transfer(NamedTuple):
    """A copy from the device ("out") to a tier, or back ("in").

    Attributes:
        begin, end: the seconds from the beginning of the trace at which the copy begins and ends.
        direction, tier, nbytes: the direction of the copy, the tier, and the bytes.
        carried: whether the CPU takes part in the copy, so that a wait for the copy is a wait of the host.
        requested: the number of operators issued before the copy was requested.
        awaited: the number of operators issued before the first one that waits for the copy; `None` without a wait.
        number: the position of the copy among all copies.
    """

    begin: float
    end: float
    direction: Direction
    tier: str
    nbytes: int
    carried: bool
    requested: int
    awaited: int | None = None
    number: int = 0

    @property
    def cause(self) -> str:
        """The cause of a wait for this copy."""
        return "disk" if self.tier == "disk" else "room" if self.direction == "out" else "input"


class CollectiveRun(NamedTuple):
    """A collective among `size` processes, over links that its group uses one after the other."""

    begin: float
    end: float
    kind: str
    nbytes: int
    size: int


@dataclass(frozen=True)
class Times:
    """The times of the events of a trace, in seconds from its beginning.

    Attributes:
        timed: whether the seconds of all operators are known.
        end: the end of the last step.
        steps: the beginning of each step.
        issued: for each operator, the moment at which the host has issued or computed the operator.
        begins, ends: for each operator, its begin and end on the device. For an operator on the host both are the
            moment at which the device had finished all earlier work.
        on_host: the indices of the operators that run on the host.
        on_streams: (index, begin, end) of each operator on a stream other than the main one.
        stalls: the waits of the device.
        held_up: the waits of the host.
        transfers: the copies between the device and a tier.
        collectives: the collectives between processes.
    """

    timed: bool
    end: float
    steps: tuple[float, ...]
    issued: tuple[float, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    on_host: tuple[int, ...]
    on_streams: tuple[tuple[int, float, float], ...]
    stalls: tuple[Stall, ...]
    held_up: tuple[Stall, ...]
    transfers: tuple[Transfer, ...]
    collectives: tuple[CollectiveRun, ...]


@dataclass(frozen=True)
class Trace:
    """Steps of one loop as they were simulated; the last one is the step that stands for all later ones.

    >>> import torch, memscale as ms
    >>> profiler = ms.MemoryProfiler(torch.nn.Linear(8, 8), loss=lambda y, _: y.sum(), hardware="t4")
    >>> trace = profiler.simulated(torch.ones(2, 8))
    >>> [op.name for op in trace.last_operators if op.phase == "forward"]
    ['aten::addmm', 'aten::sum', 'aten::ones_like']
    >>> Trace.from_json(trace.to_json()).digest() == trace.digest()
    True

    Attributes:
        hardware: the device that was simulated.
        storages: the storages, in the order of their first use.
        events: ``number + 1`` where ``storages[number]`` is allocated, ``-(number + 1)`` where it is freed, in order.
        event_ops: for each event the index of the operator that it belongs to, -1 before the first.
        ops: the operators.
        steps: for each step, the index of its first event and of its first operator.
        trims: the indices of the events before which the allocator returned its cached memory to the device.
        trims_if_grown: the indices of the events before which it did so if it had reserved more since the last of them.
        times: the times of the events.
        clock_events: the events of the clock, from which `timeline` finds the times on other hardware.
        by_tier: the most bytes on each tier below the device.
        notes: the assumptions of the simulation.
        reads_random: whether the step's own code read a random number.
    """

    hardware: Hardware
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    event_ops: tuple[int, ...]
    ops: tuple[OpCall, ...]
    steps: tuple[tuple[int, int], ...]
    trims: tuple[int, ...]
    trims_if_grown: tuple[int, ...]
    times: Times
    clock_events: tuple[tuple[Any, ...], ...]
    by_tier: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()
    reads_random: bool = False

    @property
    def last_operators(self) -> tuple[OpCall, ...]:
        """The operators of the last step."""
        return self.ops[self.steps[-1][1] :]

    def computes_in(self) -> frozenset[str]:
        """Returns the dtypes in which the last step computes products."""
        return frozenset(op.dtype for op in self.last_operators if op.flops)

    def digest(self) -> str:
        """Returns a hash of all but the hardware and the clock's events, whose times are in it.

        The hash of a step is equal in every process.
        """
        return hashlib.sha256(self._written(hardware=None, clock_events=None).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the trace as JSON text."""
        return self._written(hardware=json.loads(self.hardware.to_json()))

    def _written(self, **fields: Any) -> str:
        return _DOCUMENT.write(vars(self) | {"times": vars(self.times)} | fields)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Returns the trace that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, is of another schema version, or lacks a field.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            data["hardware"] = Hardware.from_json(json.dumps(data["hardware"]))
            data["ops"] = [OpCall(name, path, Phase(phase), *rest) for name, path, phase, *rest in data["ops"]]
            data["storages"] = [
                Storage(nbytes, op, category, tuple(shape), *rest)
                for nbytes, op, category, shape, *rest in data["storages"]
            ]
            data["times"] = Times(**_with_tuples(data["times"], _OF_TIMES))
            return cls(**_with_tuples(data, {"steps": tuple, "by_tier": tuple, "clock_events": _event}))

    def __str__(self) -> str:
        first_event, first_op = self.steps[-1]
        changes: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for event, at in zip(self.events[first_event:], self.event_ops[first_event:], strict=True):
            changes[at][event < 0] += self.storages[abs(event) - 1].nbytes
        seconds = format_seconds(self.times.end - self.times.steps[-1]) if self.times.timed else "no time"
        count = len(self.ops) - first_op
        rows = [("phase", "operator", "module", "allocates", "frees")]
        for at, op in enumerate(self.ops[first_op : first_op + _SHOWN], first_op):
            allocated, freed = map(format_bytes, changes[at])
            rows.append((op.phase.value, op.name, op.path, allocated, freed))
        more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
        return "\n".join(
            [f"trace for {self.hardware.name}, last step: {count} operators, {seconds}", *aligned(rows, "<<<>>"), *more]
        )


def _event(row: list[Any]) -> tuple[Any, ...]:
    """Returns an event of the clock, with the tuples that JSON wrote as lists."""
    to = Work._make if row[0] == "operator" else tuple
    return tuple(to(value) if isinstance(value, list) else value for value in row)


_OF_TIMES: dict[str, Any] = {
    "on_streams": tuple,
    "stalls": lambda row: Stall(*row),
    "held_up": lambda row: Stall(*row),
    "transfers": lambda row: Transfer(*row),
    "collectives": lambda row: CollectiveRun(*row),
}


def _with_tuples(fields: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """The fields with tuples where JSON has lists, whose rows are of the kinds that are given for some of them."""
    return {
        name: tuple(map(kinds[name], value)) if name in kinds else tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
    }
