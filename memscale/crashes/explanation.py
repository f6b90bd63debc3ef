"""`Explanation`: the memory of a device when an allocation failed, as frozen data with a text and an HTML report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

from memscale.algebra import Plan
from memscale.core import format_bytes, wrapped
from memscale.planning import OOMPrediction, Recommendation
from memscale.reports import PAGES, checked_target, write_page

_ROWS = 12


@dataclass(frozen=True)
class Holder:
    """The memory in use that one line of code allocated.

    Attributes:
        nbytes: the bytes of all its allocations.
        count: the number of allocations.
        category: the purpose of the memory, as far as the stack shows.
        where: the line, ``file:line in function``; ``""`` without a recorded stack.
        stack: the whole stack, innermost line first, without C++ frames.
    """

    nbytes: int
    count: int
    category: str
    where: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The cause of an out-of-memory error, as `explain` found it. ``str`` is a report, `html` writes a page.

    >>> from memscale.crashes import Explanation
    >>> found = Explanation("cuda:0", 2**30, 3 * 2**30, 2**32, None, 2**29, "", {"activation": 3 * 2**30}, ())
    >>> found.fragmentation_bytes == 2**30
    True

    Attributes:
        device: the device, as ``"cuda:0"``.
        requested_bytes: the size of the failed allocation; `None` if none failed.
        allocated_bytes: the bytes in tensors.
        reserved_bytes: the bytes that the allocator held of the device.
        available_bytes: the most that the process could hold: its reserved bytes, plus the bytes that the device had
            left or its limit allowed. `None` if no allocation failed.
        largest_free_bytes: the largest free block of the allocator; `None` if unknown.
        failed_at: the line of code whose allocation failed; ``""`` if unknown.
        by_category: the bytes in tensors by purpose.
        holders: the memory by line of code, largest first.
        prediction: the prediction of the step, with a plan that fits; `None` without a model.
        notes: the facts that are unknown, with the reasons.
    """

    device: str
    requested_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    available_bytes: int | None
    largest_free_bytes: int | None = None
    failed_at: str = ""
    by_category: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    prediction: OOMPrediction | None = None
    notes: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int:
        """The reserved bytes that no tensor used, possibly in several blocks."""
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def left_bytes(self) -> int | None:
        """The bytes that the process could still have reserved; `None` if no allocation failed."""
        return None if self.available_bytes is None else max(0, self.available_bytes - self.reserved_bytes)

    @property
    def fragmentation_bytes(self) -> int | None:
        """`free_bytes`, if they and `left_bytes` would have been enough in one block for the failed allocation; else 0.

        `None` if no allocation failed.
        """
        if self.requested_bytes is None:
            return None
        free, left = self.free_bytes, self.left_bytes or 0
        return free if left <= self.requested_bytes <= free + left else 0

    @property
    def plan(self) -> Plan | None:
        """The plan under which the simulated step fits; `None` if no plan fits, or no model was given."""
        return next((each.plan for each, fits in self._recommended() if each.plan and fits), None)

    @property
    def message(self) -> str:
        """The cause in one sentence."""
        held = f"tensors held {format_bytes(self.allocated_bytes)}"
        if self.requested_bytes is None:
            return f"{self.device}: no allocation failed; {held}"
        where = f" at {self.failed_at}" if self.failed_at else ""
        text = f"{self.device}: an allocation of {format_bytes(self.requested_bytes)} failed{where}; {held}"
        text += f", the allocator had {format_bytes(self.free_bytes)} free"
        if left := self.left_bytes:
            text += f" and the device had {format_bytes(left)} left"
        if left and left > self.requested_bytes:
            return f"{text}, which is enough: the process had a limit below the device's memory; pass it as budget"
        if self.fragmentation_bytes:
            largest = self.largest_free_bytes
            size = "is smaller" if largest is None else f"has {format_bytes(largest)}"
            return f"{text}, enough together but in pieces: the largest free block {size} (fragmentation)"
        return f"{text}, together less than the allocation"

    def html(self, path: str | PathLike[str]) -> None:
        """Writes the report as one self-contained HTML file.

        Raises:
            ConfigError: the suffix is not ``.html``, or the folder does not exist.
        """
        target = checked_target(path, "Explanation.html", PAGES, "print it for a text")
        write_page(target, "held.html", it=self, simulated=self._simulated(), remedies=self._remedies())

    def _simulated(self) -> list[str]:
        return [] if self.prediction is None else [f"simulated: {self.prediction.message}"]

    def _recommended(self) -> list[tuple[Recommendation, bool]]:
        """Returns what the prediction recommends, and whether each fits."""
        if self.prediction is None:
            return []
        return [(each, each.peak_bytes <= self.prediction.capacity_bytes) for each in self.prediction.recommendations]

    def _remedies(self) -> list[str]:
        lines = []
        if self.fragmentation_bytes:
            lines.append("PYTORCH_ALLOC_CONF=expandable_segments:True joins the free pieces")
        for each, fits in self._recommended():
            fate = "fits" if fits else "does not fit"
            lines.append(f"{each.action}: peak {format_bytes(each.peak_bytes)}, {fate}")
        return lines

    def __str__(self) -> str:
        lines = self.message.split("; ")
        if self.available_bytes is not None:
            lines.append(
                f"the allocator had reserved {format_bytes(self.reserved_bytes)} of at most "
                f"{format_bytes(self.available_bytes)}"
            )
        lines += [
            f"  {category:<16} {format_bytes(nbytes):>10}"
            for category, nbytes in sorted(self.by_category.items(), key=lambda item: -item[1])
        ]
        if self.holders:
            lines.append("allocated by")
        for each in self.holders[:_ROWS]:
            lines.append(f"  {format_bytes(each.nbytes):>10} in {each.count:>4}  {each.where or '(no stack)'}")
        if (rest := self.holders[_ROWS:]) and (nbytes := sum(each.nbytes for each in rest)):
            lines.append(f"  {format_bytes(nbytes):>10} elsewhere, by {len(rest)} more lines")
        lines += self._simulated()
        if remedies := self._remedies():
            lines += ["what would help", *(f"  {each}" for each in remedies)]
        return wrapped("\n".join([*lines, *(f"note: {note}" for note in self.notes)]))
