"""The clock of a simulated step: the queues of the device, the link, the disk and collectives, and the host's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from memscale.hardware import COLLECTIVES, Direction, Hardware, copy_seconds, host_calls
from memscale.simulation.trace import CollectiveRun, Stall, Times, Transfer

#: The causes of a wait of the device: "input", a copy in of an operator's input; "room", a copy out of memory that is
#: used again; "disk", such a copy to or from the disk; "host", the host's next launch; "stream", another stream of the
#: device; or a collective.
CAUSES = ("input", "room", "disk", "host", "stream", *COLLECTIVES)

# A launch waits while this many launches are queued: the measured size of CUDA's queue.
_MOST_QUEUED = 1024


class Mark(NamedTuple):
    """The end of a piece of work in seconds, and the cause of a wait for it.

    Attributes:
        end: the end of the last part of the work.
        cause: the cause of a wait for the last part.
        before: the part that the last part began directly after; until the end of `before`, a wait is for `before`.
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


@dataclass(slots=True, eq=False)
class SideStream:
    """A stream of the device that runs concurrently with the main stream.

    Attributes:
        mark: the end of all work that the stream was given.
        cause: the cause of a wait for this stream.
    """

    mark: Mark = field(default_factory=lambda: Mark(0.0, "stream"))
    cause: str = "stream"

    @property
    def end(self) -> float:
        """The end in seconds of all work that the stream was given."""
        return self.mark.end


class Clock:
    """A clock of simulated seconds since its creation. Queues work in order, so the end of each work is known at once.

    On a CPU the host is the device, so a wait takes effect immediately.

    >>> clock = Clock(Hardware(name="card", device_type="cuda", memory_bytes=1, host_to_device_bytes_per_second=1e9,
    ...                        device_to_host_bytes_per_second=1e9, measured=True))
    >>> clock.calls(clock.host.operator)
    >>> clock.operator(1e-3)
    >>> back = clock.copy("in", "pinned", 2_000_000, ready=clock.now, requested=1)
    >>> clock.come_after(back)
    >>> clock.operator(1e-3)
    >>> f"{clock.ends[-1] * 1e3:.2f} ms", [stall.cause for stall in clock.stalls]
    ('3.03 ms', ['host', 'input'])

    Args:
        hardware: the simulated device.

    Attributes:
        host: the seconds of the host's calls.
        is_host: whether the device is the host itself, a CPU.
        now: the host's time in seconds.
        timed, end, steps, issued, begins, ends, stalls, held_up, transfers, collectives: as in `Times`.
        on_host: the numbers of the operators that run on the host.
        stream: the stream that receives operators; None is the main stream.
        beside: number of an operator on another stream -> its begin and end.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
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
        self.stream: SideStream | None = None
        self.beside: dict[int, tuple[float, float]] = {}
        self._of_groups: dict[str, Mark] = {}  # the last collective of each group
        self.is_host = hardware.device_type == "cpu"
        self.host = host_calls(hardware)
        self._end = 0.0  # of all that the device was given
        self._awaited: list[Mark] = []  # what its next operator comes after
        self._accounted = 0  # how many of `held_up` the device has stood still for
        # Where the device would be if no collective had held it up, and the stalls that it is behind that by: their
        # places, and how much of each is still behind.
        self._free = 0.0
        self._behind: list[tuple[int, float]] = []
        # The same of each operator, and how far the host is behind, whose launches wait while many are queued: a host
        # that waits for a device that waits for links is not late.
        self._free_ends: list[float] = []
        self._host_behind = 0.0
        self._link_ends: dict[Direction, float] = {"out": 0.0, "in": 0.0}
        self._carried_ends: dict[Direction, float] = {"out": 0.0, "in": 0.0}
        self._disk_end = 0.0

    def times(self) -> Times:
        """Returns when everything so far happened."""
        return Times(
            self.timed,
            self.end,
            tuple(self.steps),
            tuple(self.issued),
            tuple(self.begins),
            tuple(self.ends),
            tuple(sorted(self.on_host)),
            tuple((op, begin, end) for op, (begin, end) in self.beside.items()),
            tuple(self.stalls),
            tuple(self.held_up),
            tuple(self.transfers),
            tuple(self.collectives),
        )

    def begin_step(self) -> None:
        """Begins a step, at the moment when the device has caught up with the host."""
        self._catch_up()
        self.steps.append(self._end)

    def end_step(self) -> None:
        """End a step, at the moment when the device has caught up with the host; running copies delay the next step."""
        self._catch_up()
        self._behind.clear()
        self._host_behind = 0.0
        self.end = self._free = self._end

    def calls(self, seconds: float) -> None:
        """Advances the host by a call of `seconds`, see `HostSeconds`."""
        self.now += seconds

    def operator(self, seconds: float | None) -> None:
        """Issues an operator of `seconds` (None if unknown) on the current stream; 0 seconds launch no kernel."""
        if seconds is None:
            self.timed, seconds = False, 0.0
        if seconds and self.stream is not None:
            self._beside(self.stream, seconds)
            return
        if seconds:
            if len(self.ends) >= _MOST_QUEUED and self.ends[-_MOST_QUEUED] > self.now:
                free = max(self.now - self._host_behind, self._free_ends[-_MOST_QUEUED])
                self.now = self.ends[-_MOST_QUEUED]
                self._host_behind = max(0.0, self.now - free)
            if self.now > self._end or self._awaited:
                self._catch_up()
            elif self._behind:
                self._would_stand_still(self.now - self._host_behind, "host", 0.0)
        self.begins.append(self._end)
        self._end = end = self._end + seconds
        self._free += seconds
        self.ends.append(end)
        self._free_ends.append(self._free)
        if self.is_host:
            self.now = max(self.now, end)  # after a wait the host's time may be past the operator's end
        self.issued.append(self.now)

    def _beside(self, side: SideStream, seconds: float) -> None:
        begin = max(self.now, side.end)
        side.mark = Mark.behind(side.mark, begin, begin + seconds, side.cause)
        self.beside[len(self.ends)] = begin, side.end
        self.issued.append(self.now)
        self.begins.append(self._end)
        self.ends.append(self._end)
        self._free_ends.append(self._free)

    def mark(self, side: SideStream | None) -> Mark:
        """Returns the mark of the end of all work that a stream was given so far."""
        return Mark(self.point(), "host") if side is None else side.mark

    def wait(self, mark: Mark, side: SideStream | None) -> None:
        """Makes all later work of the stream `side` (None is the main stream) begin after `mark`."""
        if side is not None:
            side.mark = mark if mark.end > side.end else side.mark
        elif self.is_host:
            self.hold_up_for(mark)
        elif mark.end > self._end:
            self._awaited.append(mark)

    def collective(self, kind: str, group: str, size: int, nbytes: int, seconds: float) -> Mark:
        """Issues a collective on the current stream, which runs after the earlier collectives of its group.

        Args:
            kind, nbytes: see `collective_seconds`.
            group: the name of the process group.
            size: the number of processes of the group.
            seconds: the seconds of the collective.
        """
        self.now += self.host.operator
        given = self.mark(self.stream)
        before = max(given, self._of_groups.get(group, given), key=lambda mark: mark.end)
        begin = max(self.now, before.end)
        self._of_groups[group] = mark = Mark.behind(before, begin, begin + seconds, kind)
        self.collectives.append(CollectiveRun(begin, mark.end, kind, nbytes, size))
        if self.stream is not None:
            self.stream.cause = kind
        return mark

    def host_operator(self, seconds: float) -> None:
        """Advances the host by an operator that it computes itself."""
        self.now += seconds
        self.on_host.add(len(self.ends))
        self.issued.append(self.now)
        self.begins.append(self._end)
        self.ends.append(self._end)
        self._free_ends.append(self._free)

    def across(self, direction: Direction, nbytes: int) -> float:
        """Copies `nbytes` between device and host after all work of the device, and makes the host wait for the copy.

        Returns:
            The seconds of the copy.
        """
        transfer = self.copy(direction, "pinned", nbytes, ready=self.point(), requested=len(self.ends))
        self.host_operator(0.0)
        self.hold_up(transfer.end, transfer.cause)
        return transfer.end - transfer.begin

    def point(self) -> float:
        """Returns the end in seconds of all work that the device was given so far."""
        return max(self._end, self.now, *(mark.end for mark in self._awaited))

    def come_after(self, transfer: Transfer) -> None:
        """Make all later work of the device begin after a copy; for a copy that the CPU carries, the host waits too."""
        if self.transfers[transfer.number].awaited is None:
            self.transfers[transfer.number] = transfer._replace(awaited=len(self.ends))
        if transfer.carried:
            self.hold_up(transfer.end, transfer.cause)
        elif transfer.end > self._end:
            self._awaited.append(Mark(transfer.end, transfer.cause))

    def hold_up_for(self, mark: Mark) -> None:
        """Makes the host wait for all parts of `mark`."""
        for end, cause in mark.parts():
            self.hold_up(end, cause)

    def hold_up(self, end: float, cause: str) -> None:
        """Makes the host wait until `end` in seconds."""
        if end > self.now:
            self.held_up.append(Stall(self.now, end, cause, len(self.ends)))
            self.now = end

    def copy(self, direction: Direction, tier: str, nbytes: int, *, ready: float, requested: int) -> Transfer:
        """Issues a copy that starts at `ready` at the earliest, and after all earlier copies in its direction.

        Args:
            direction, tier, nbytes, requested: see `Transfer`.
            ready: the moment in seconds from which the copy may run.
        """
        begin = max(ready, self.now, self._link_ends[direction], self._carried_ends[direction])
        if tier == "disk":
            begin = max(begin, self._disk_end)
        self.calls(self.host.copy)
        # The CPU also carries a copy that follows a carried one, since it must not overtake.
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

    def copy_in_stream(self, direction: Direction, tier: str, nbytes: int) -> None:
        """Issues a copy on the current stream, after its earlier work and before its later work."""
        side = self.stream
        ready = self.point() if side is None else side.end
        transfer = self.copy(direction, tier, nbytes, ready=ready, requested=len(self.ends))
        if side is None:
            self.come_after(transfer)
            return
        side.mark = Mark.behind(side.mark, transfer.begin, transfer.end, transfer.cause)
        if transfer.carried:
            self.hold_up(transfer.end, transfer.cause)

    def _catch_up(self) -> None:
        """Make the device wait until the host's present time, and then for all marks that its next work comes after."""
        at = self._end
        if not (self._awaited or self._behind) and self._accounted == len(self.held_up):  # the host is all it waits for
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
        if self._behind and cause not in COLLECTIVES:
            free = end - self._host_behind if cause == "host" else end
            self._would_stand_still(free, cause, max(0.0, end - begin))
        if end > begin:
            if cause in COLLECTIVES and not self.is_host:
                if not self._behind:
                    self._free = begin
                self._behind.append((len(self.stalls), end - begin))
            self.stalls.append(Stall(begin, end, cause, len(self.ends)))
            return end
        return begin

    def _would_stand_still(self, end: float, cause: str, still: float) -> None:
        """Charges earlier waits for collectives to `cause` as far as the device would have waited without collectives.

        Without collectives the device would wait until `end`; with them it waits `still` seconds. The difference moves
        from the collectives to `cause`: else a step that only the host slows down would seem to wait for its links.
        """
        seconds = end - self._free - still
        self._free = max(self._free, end)
        while seconds > 0 and self._behind:
            at, left = self._behind.pop()
            taken = min(left, seconds)
            seconds -= taken
            begin, _, waited_for, op = self.stalls[at]
            rest = left - taken
            following = self.stalls[at + 1] if at + 1 < len(self.stalls) else None
            until = begin + left
            if following is not None and (following.begin, following.cause) == (until, cause):
                until = following.end
                del self.stalls[at + 1]
            free = Stall(begin + rest, until, cause, op)
            self.stalls[at : at + 1] = [Stall(begin, free.begin, waited_for, op), free] if rest > 0 else [free]
            if rest > 0:
                self._behind.append((at, rest))
