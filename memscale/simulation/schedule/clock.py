"""The clock of a simulated step: the queues of the device, the host, the link, the disk and the collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memscale.core import ConfigError
from memscale.hardware import (
    COLLECTIVES,
    Direction,
    Hardware,
    Work,
    collective_seconds,
    copy_seconds,
    host_calls,
    host_seconds,
    knows_copies,
    seconds,
    span,
)
from memscale.simulation.trace import CollectiveRun, Stall, Times, Trace, Transfer

#: What the device waits for: "input", the copy in of an operator's input; "room", the copy out of memory that is to be
#: reused; "disk", either copy from or to the disk; "host", the host's next launch; "stream", another stream of the
#: device; or the kind of a collective.
CAUSES = ("input", "room", "disk", "host", "stream", *COLLECTIVES)

# Launches in CUDA's queue while another one waits. Assumed for every card and driver, as it was measured on one.
_MOST_QUEUED = 1024


class Mark(NamedTuple):
    """The end of a piece of work in seconds, and the cause of a wait for it.

    Attributes:
        end: the end of the last part of the work.
        cause: the cause of a wait for the last part.
        before: the part that ended when the last part began; until then a wait is for `before`.
    """

    end: float
    cause: str
    before: Mark | None = None

    @classmethod
    def behind(cls, before: Mark, begin: float, end: float, cause: str) -> Mark:
        """Returns the mark of work from `begin` to `end` that had to begin after `before`."""
        if before.end < begin:
            return cls(end, cause)
        return cls(end, cause, before.before if before.cause == cause else before)

    def parts(self) -> list[tuple[float, str]]:
        """Returns the end and the cause of each part, in the order of their ends."""
        found: list[tuple[float, str]] = []
        mark: Mark | None = self
        while mark is not None:
            found.append((mark.end, mark.cause))
            mark = mark.before
        return found[::-1]


# hardware -> id of a cost -> the cost and its seconds. Costs stay alive for the process, in the effects of calls.
_prices: dict[Hardware, dict[int, tuple[Work, float | None]]] = {}
_MOST_PRICED, _MOST_PRICES = 16, 1 << 15  # devices, and prices of each; a bound on memory, by choice


class _Point(NamedTuple):
    """The end of a copy (number `copy`) or of other work; `op` is the number of operators issued before."""

    mark: Mark
    op: int
    copy: int | None = None


@dataclass(slots=True, eq=False)
class _SideStream:
    """A stream that runs concurrently with the main stream: the end of its work, and the cause of a wait for it."""

    mark: Mark = field(default_factory=lambda: Mark(0.0, "stream"))
    cause: str = "stream"


class Clock:
    """A clock of simulated seconds since its creation. Queues work in order, so all ends are known at issue.

    On a CPU the host is the device, so a wait takes effect immediately. The clock records each event as a call with its
    arguments; points and streams are numbers. Events hold no times, so `timeline` can replay them on the clock of other
    hardware.

    >>> clock = Clock(Hardware(name="card", device_type="cuda", memory_bytes=1, host_to_device_bytes_per_second=1e9,
    ...                        device_to_host_bytes_per_second=1e9, measured=True))
    >>> clock.operator(1e-3)
    0.001
    >>> back = clock.copy("in", "pinned", 2_000_000, ())
    >>> clock.come_after(back)
    >>> clock.operator(1e-3)
    0.001
    >>> f"{clock.ends[-1] * 1e3:.2f} ms", [stall.cause for stall in clock.stalls]
    ('3.03 ms', ['host', 'input'])

    Args:
        hardware: the simulated device.

    Attributes:
        events: (name of a method, *its arguments) for each event.
        host: the seconds of the host's calls.
        is_host: whether the device is the host itself, a CPU.
        now: the host's time in seconds.
        timed, end, steps, issued, begins, ends, stalls, held_up, transfers, collectives: as in `Times`.
        on_host: the numbers of the operators that run on the host.
        stream: the number of the stream that receives operators; 0 is the main stream.
        side_times: number of an operator on another stream -> its begin and end.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.events: list[tuple[Any, ...]] = []
        self.now = self.end = 0.0
        self.timed = True
        self.steps: list[float] = []
        self.issued: list[float] = []
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.stalls: list[Stall] = []
        self.held_up: list[Stall] = []
        self.on_host: set[int] = set()
        self.transfers: list[Transfer] = []
        self.collectives: list[CollectiveRun] = []
        self.stream = 0
        self.side_times: dict[int, tuple[float, float]] = {}
        self.is_host = hardware.device_type == "cpu"
        self.host = host_calls(hardware)
        if len(_prices) > _MOST_PRICED or len(_prices.get(hardware, ())) > _MOST_PRICES:
            _prices.clear()
        self._prices = _prices.setdefault(hardware, {})
        self._sides: dict[int, _SideStream] = defaultdict(_SideStream)  # by number
        self._points: list[_Point] = []
        self._of_groups: dict[str, Mark] = {}  # the last collective of each group
        self._end = 0.0  # of all work that the device was given
        self._awaited: list[Mark] = []  # the marks that the device's next operator comes after
        self._accounted = 0  # the number of waits in `held_up` that are charged to the device
        self._link_ends: dict[Direction, float] = {"out": 0.0, "in": 0.0}
        self._carried_ends: dict[Direction, float] = {"out": 0.0, "in": 0.0}
        self._disk_end = 0.0

    def times(self) -> Times:
        """Returns the times of all events so far."""
        return Times(
            self.timed,
            self.end,
            tuple(self.steps),
            tuple(self.issued),
            tuple(self.begins),
            tuple(self.ends),
            tuple(sorted(self.on_host)),
            tuple((op, begin, end) for op, (begin, end) in self.side_times.items()),
            tuple(self.stalls),
            tuple(self.held_up),
            tuple(self.transfers),
            tuple(self.collectives),
        )

    # -- events --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a step at the time when the device has caught up with the host."""
        self.events.append(("begin_step",))
        self._catch_up()
        self.steps.append(self._end)

    def end_step(self) -> None:
        """Ends a step at the time when the device has caught up with the host; running copies delay the next step."""
        self.events.append(("end_step",))
        self._catch_up()
        self.end = self._end

    def trust(self) -> None:
        """Declares the seconds of all operators known, including operators without a rate of the hardware."""
        self.events.append(("trust",))
        self.timed = True

    def calls(self, kind: str) -> None:
        """Advances the host by the seconds of a call; `kind` is a field of `HostSeconds`."""
        self.events.append(("calls", kind))
        self.now += getattr(self.host, kind)

    def operator(self, cost: Work | float, kind: str = "operator", listed: int = 0) -> float | None:
        """Issues an operator on the current stream, and returns its seconds (None if unknown).

        Args:
            cost: the cost of its kernel, or its measured seconds; an operator of 0 seconds launches no kernel.
            kind: the field of `HostSeconds` with the seconds of the call.
            listed: the number of tensors in a list argument.
        """
        self.events.append(("operator", cost, kind, listed))
        taken = cost if isinstance(cost, float) else self._price(cost)
        if not taken:
            self.now += self.host.view
        else:
            self.now += getattr(self.host, kind)
            if listed:
                self.now += listed * self.host.listed
        self._launch(taken)
        return taken

    def host_operator(self, nbytes: int) -> float:
        """Advances the host by an operator of the CPU with `nbytes` of memory traffic; returns its seconds."""
        self.events.append(("host_operator", nbytes))
        taken = host_seconds(nbytes, self.hardware)
        self._compute(taken)
        return taken

    def across(self, direction: Direction, nbytes: int) -> float:
        """Copies `nbytes` between device and host after all work of the device, and makes the host wait for the copy.

        Returns:
            The seconds of the copy.
        """
        self.events.append(("across", direction, nbytes))
        transfer = self._copy(direction, "pinned", nbytes, ready=self._point(), requested=len(self.ends))
        self._compute(0.0)
        self._hold_up(transfer.end, transfer.cause)
        return transfer.end - transfer.begin

    def switch(self, stream: int) -> None:
        """Makes a stream the current one; a stream above 0 runs concurrently with the others."""
        self.events.append(("switch", stream))
        self.stream = stream

    def point(self, stream: int = 0) -> int:
        """Returns the number of a point: the end of all work that a stream was given so far."""
        self.events.append(("point", stream))
        return self._noted(self._mark(stream))

    def wait(self, number: int, stream: int) -> None:
        """Makes all later work of a stream begin after a point."""
        self.events.append(("wait", number, stream))
        mark = self._points[number].mark
        if stream:
            self._sides[stream].mark = max(self._sides[stream].mark, mark, key=lambda each: each.end)
        elif self.is_host:
            self._hold_up_for(mark)
        elif mark.end > self._end:
            self._awaited.append(mark)

    def hold_up(self, number: int) -> None:
        """Makes the host wait for a point."""
        self.events.append(("hold_up", number))
        self._hold_up_for(self._points[number].mark)

    def collective(self, kind: str, group: str, ranks: Sequence[int], nbytes: int) -> int:
        """Issues a collective on the current stream, which runs after the earlier collectives of its group.

        Args:
            kind, nbytes: see `collective_seconds`.
            group: the name of the process group.
            ranks: the processes of the group.

        Returns:
            The number of the point of its end.
        """
        self.events.append(("collective", kind, group, ranks, nbytes))
        taken = collective_seconds(kind, nbytes, span(ranks, self.hardware), self.hardware)
        if not taken:  # of one process, or over links of unknown speed
            return self._noted(Mark(0.0, kind))
        self.now += self.host.operator
        given = self._mark(self.stream)
        before = max(given, self._of_groups.get(group, given), key=lambda mark: mark.end)
        begin = max(self.now, before.end)
        self._of_groups[group] = mark = Mark.behind(before, begin, begin + taken, kind)
        self.collectives.append(CollectiveRun(begin, mark.end, kind, nbytes, len(ranks)))
        if self.stream:
            self._sides[self.stream].cause = kind
        return self._noted(mark)

    def copy(self, direction: Direction, tier: str, nbytes: int, after: Sequence[int]) -> int:
        """Issues a copy that starts after the points `after`, and after all earlier copies in its direction.

        Returns:
            The number of the point of its end.
        """
        self.events.append(("copy", direction, tier, nbytes, after))
        points = [self._points[number] for number in after]
        ready = max((each.mark.end for each in points), default=0.0)
        requested = max((each.op for each in points if each.copy is None), default=len(self.ends))
        transfer = self._copy(direction, tier, nbytes, ready=ready, requested=requested)
        return self._noted(Mark(transfer.end, transfer.cause), transfer.number)

    def copy_in_stream(self, direction: Direction, tier: str, nbytes: int) -> None:
        """Issues a copy on the current stream, after its earlier work and before its later work."""
        self.events.append(("copy_in_stream", direction, tier, nbytes))
        side = self._sides[self.stream]
        ready = side.mark.end if self.stream else self._point()
        transfer = self._copy(direction, tier, nbytes, ready=ready, requested=len(self.ends))
        if not self.stream:
            self._come_after(transfer)
            return
        side.mark = Mark.behind(side.mark, transfer.begin, transfer.end, transfer.cause)
        if transfer.carried:
            self._hold_up(transfer.end, transfer.cause)

    def come_after(self, number: int) -> None:
        """Makes all later work of the device begin after a point, if the point is the end of a copy.

        If the CPU carries the copy, the host waits as well.
        """
        self.events.append(("come_after", number))
        if (copy := self._points[number].copy) is not None:
            self._come_after(self.transfers[copy])

    # -- reads, which record no event ----------------------------------------------------------------------------------

    def end_of(self, point: int) -> float:
        """Returns the end of a point in seconds."""
        return self._points[point].mark.end

    def transfer_of(self, point: int) -> Transfer | None:
        """Returns the copy that ends at a point; None for a point of other work."""
        copy = self._points[point].copy
        return None if copy is None else self.transfers[copy]

    # ------------------------------------------------------------------------------------------------------------------

    def _price(self, cost: Work) -> float | None:
        """Returns the seconds of a kernel; None where the hardware's rates are unknown."""
        known = self._prices.get(id(cost))
        if known is None:
            taken = None
            with suppress(ConfigError):
                taken = seconds(cost, self.hardware)
            known = self._prices[id(cost)] = cost, taken
        return known[1]

    def _launch(self, taken: float | None) -> None:
        """Issues a kernel on the current stream; 0 seconds launch no kernel."""
        if taken is None:
            self.timed, taken = False, 0.0
        if taken and self.stream:
            side = self._sides[self.stream]
            begin = max(self.now, side.mark.end)
            side.mark = Mark.behind(side.mark, begin, begin + taken, side.cause)
            self.side_times[len(self.ends)] = begin, side.mark.end
            self._issue()
            return
        if taken:
            if len(self.ends) >= _MOST_QUEUED and self.ends[-_MOST_QUEUED] > self.now:
                self.now = self.ends[-_MOST_QUEUED]
            if self.now > self._end or self._awaited:
                self._catch_up()
        self.begins.append(self._end)
        self._end = end = self._end + taken
        self.ends.append(end)
        if self.is_host:
            self.now = max(self.now, end)  # after a wait the host's time may be past the operator's end
        self.issued.append(self.now)

    def _compute(self, taken: float) -> None:
        """Advances the host by an operator of the CPU."""
        self.now += taken
        self.on_host.add(len(self.ends))
        self._issue()

    def _issue(self) -> None:
        """Records an operator of the host or of a side stream, at the present time of the main stream."""
        self.issued.append(self.now)
        self.begins.append(self._end)
        self.ends.append(self._end)

    def _mark(self, stream: int) -> Mark:
        return self._sides[stream].mark if stream else Mark(self._point(), "host")

    def _noted(self, mark: Mark, copy: int | None = None) -> int:
        self._points.append(_Point(mark, len(self.ends), copy))
        return len(self._points) - 1

    def _point(self) -> float:
        """Returns the end in seconds of all work that the device was given so far."""
        return max(self._end, self.now, *(mark.end for mark in self._awaited))

    def _come_after(self, transfer: Transfer) -> None:
        if transfer.awaited is None:
            self.transfers[transfer.number] = transfer._replace(awaited=len(self.ends))
        if transfer.carried:
            self._hold_up(transfer.end, transfer.cause)
        elif transfer.end > self._end:
            self._awaited.append(Mark(transfer.end, transfer.cause))

    def _hold_up_for(self, mark: Mark) -> None:
        for end, cause in mark.parts():
            self._hold_up(end, cause)

    def _hold_up(self, end: float, cause: str) -> None:
        """Makes the host wait until `end` in seconds."""
        if end > self.now:
            self.held_up.append(Stall(self.now, end, cause, len(self.ends)))
            self.now = end

    def _copy(self, direction: Direction, tier: str, nbytes: int, *, ready: float, requested: int) -> Transfer:
        begin = max(ready, self.now, self._link_ends[direction], self._carried_ends[direction])
        if tier == "disk":
            begin = max(begin, self._disk_end)
        self.now += self.host.copy
        # The CPU also carries a copy that is issued behind a carried copy: copies of a direction keep their order.
        carried = self.is_host or tier != "pinned" or self._carried_ends[direction] > self.now
        end = begin + copy_seconds(nbytes, tier, direction, self.hardware)
        if tier == "disk":
            self._disk_end = end
        if not self.is_host:
            self._link_ends[direction] = end
        if carried:
            self._carried_ends[direction] = end
        self.transfers.append(
            Transfer(begin, end, direction, tier, nbytes, carried, requested, number=len(self.transfers))
        )
        return self.transfers[-1]

    def _catch_up(self) -> None:
        """Makes the device wait for the host's present time, and then for all awaited marks."""
        at = self._end
        if not self._awaited and self._accounted == len(self.held_up):  # waits for the host alone
            if self.now > at:
                self.stalls.append(tuple.__new__(Stall, (at, self.now, "host", len(self.ends))))
                self._end = self.now
            return
        for begin, end, cause, _ in self.held_up[self._accounted :]:
            at = self._stand_still(at, begin, "host")
            at = self._stand_still(at, end, cause)
        at = self._stand_still(at, self.now, "host")
        for mark in self._awaited:
            for end, cause in mark.parts()[:-1]:
                at = self._stand_still(at, end, cause) if end > at else at
            at = self._stand_still(at, mark.end, mark.cause)
        self._end = at
        self._accounted = len(self.held_up)
        self._awaited.clear()

    def _stand_still(self, begin: float, end: float, cause: str) -> float:
        if end > begin:
            self.stalls.append(Stall(begin, end, cause, len(self.ends)))
            return end
        return begin


def timeline(trace: Trace, hardware: Hardware) -> Times:
    """Returns the times of the events of a trace on hardware; ``trace.times`` for the hardware of the trace.

    The kernels, copies and collectives of the trace stay the same. On hardware with another link the offload engine,
    which decides by the time, may copy in another order: simulate the step for that hardware to get its order.

    >>> import dataclasses, torch, memscale as ms
    >>> trace = ms.MemoryProfiler(torch.nn.Linear(8, 8), loss=lambda y, _: y.sum(), hardware="h100").simulated(
    ...     torch.ones(2, 8))
    >>> slow = dataclasses.replace(trace.hardware, launch_seconds=1.0)
    >>> timeline(trace, trace.hardware) == trace.times, timeline(trace, slow).end > 1
    (True, True)

    Raises:
        ConfigError: `hardware` has another device type or compute capability, or the trace has copies and the speeds
            of the link are unknown.
    """
    if (hardware.device_type, hardware.capability) != (trace.hardware.device_type, trace.hardware.capability):
        raise ConfigError(
            f"timeline(trace, hardware={hardware.name!r}): the trace has the kernels of {trace.hardware.name}, of "
            "another kind of device or compute capability; simulate the step for this hardware"
        )
    if trace.times.transfers and not knows_copies(hardware):
        raise ConfigError(
            f"timeline(trace, hardware={hardware.name!r}): the trace has copies to the host, and the speed of this "
            "link is unknown; pass it with dataclasses.replace(hardware, host_to_device_bytes_per_second=..., "
            "device_to_host_bytes_per_second=...)"
        )
    clock = Clock(hardware)
    for name, *given in trace.clock_events:
        getattr(clock, name)(*given)
    return clock.times()
