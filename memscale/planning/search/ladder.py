"""The choices for budgets that fall by a fixed share, which no budget that is asked for has a say in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from memscale.planning.solving.solver import Choice, Chooser
from memscale.planning.trials.costs import Assignment

# By how much a rung is below the one before: finer than what is asked of the use of a budget, and coarser than the
# solver's own distance from the best.
_STEP = 2e-3
_ROUNDING = 1 + 1e-9
# A plan that uses this share of the budget is not worth another round, unless that may find one that is faster by the
# other: what streams does so in large steps.
USED, WORTH = 0.97, 0.03
# Rounds go as far along the ladder as the one before was off; after so many in a row on one side of the budget, by
# halves; and from above it by this share further at first, or many would end just above it.
_HALVES, _BEYOND, _LEAST_AIM = 3, 4e-3, 0.1
# What is faster by less than this share is not looked for: the solver's own choices are that far from the best.
FASTER = 1e-3
# Where simulations are to be few: nor among other techniques what is faster by less than this; and after so many rounds
# in a row above the budget no more, once something fits.
_OTHERS, _MISSES = 5e-3, 2


class Shown(Protocol):
    """What a simulated step takes."""

    @property
    def taken_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...


@dataclass
class Seen:
    """What steps were beside what was thought of them.

    Attributes:
        share: of what one took, what it was thought to hold, at most.
        late: by how many seconds each was later, at least.
        any: whether there was one.
    """

    share: float = 1.0
    late: float = 0.0
    any: bool = False

    def add(self, held_bytes: float, seconds: float, found: Shown) -> None:
        """A step was thought to hold and to take so much."""
        share, late = held_bytes / found.taken_bytes, found.seconds - seconds
        self.share = max(self.share, share) if self.any else share
        self.late = min(self.late, late) if self.any else late
        self.any = True


class Ladder:
    """Choices, each solved for when it is first asked for, from the most bytes down.

    All budgets look for theirs on it: where what a step takes is not what was thought of it (an allocator that gives
    memory in large pieces, copies that are late), a search of each budget's own finds what a smaller one did not.

    Args:
        chooser: that knows of the step as it is, and learns nothing.
        most_bytes: the limit of the first rung.
        among: the techniques of which candidates may be chosen.
    """

    def __init__(self, chooser: Chooser, most_bytes: int, among: frozenset[str]) -> None:
        self._chooser, self._most_bytes, self._among = chooser, most_bytes, among
        self._choices: dict[int, Choice | None] = {}

    @functools.cached_property
    def least(self) -> Choice:
        """The choice that is thought to hold least."""
        return self._chooser.smallest(self._among)

    @functools.cached_property
    def last(self) -> int:
        """The last rung that has a choice."""
        return self.until(self.least, 0)

    def rung(self, limit_bytes: float) -> int:
        """The first with no more than these bytes."""
        return max(0, math.ceil(math.log(max(1, limit_bytes) / self._most_bytes) / math.log(1 - _STEP) - 1e-9))

    def limit_bytes(self, rung: int) -> float:
        """Of a rung."""
        return self._most_bytes * _ROUNDING * float((1 - _STEP) ** rung)

    def choice(self, rung: int) -> Choice:
        """The fastest that is thought to hold no more than the rung's bytes; there is one down to the last rung."""
        while self._solved(rung) is None and rung < self.last:  # the solver gave up where there is one
            rung += 1
        return self._solved(rung) or self.least

    def until(self, choice: Choice, rung: int) -> int:
        """The last rung that has this choice, which `rung` has."""
        return max(rung, self.rung(self._chooser.held_bytes(choice.assignment)) - 1)

    def seconds(self, assignment: Assignment) -> float:
        """What it is thought to take."""
        return self._chooser.seconds(assignment)

    def may_be_faster(self, limit_bytes: float, late: float, below: float) -> bool:
        """Whether a choice of so many bytes may be faster than `below` by what is worth looking for among others."""
        return self._chooser.least_seconds(limit_bytes, self._among) + late < below * (1 - _OTHERS)

    def look(
        self,
        prove: Callable[[Assignment], Shown],
        limit_bytes: int,
        below: float,
        rounds: int,
        seen: Seen | None = None,
    ) -> list[float]:
        """Simulate choices, up and down the ladder, until one uses what there is or the next faster one takes more.

        Args:
            prove: simulates the step with a choice.
            limit_bytes: what it may take.
            below: the time of a step that is known besides; what is not thought to be faster is not simulated.
            rounds: at most so many simulations of choices; of each that takes more, a surer form may be simulated, too.
            seen: where simulations are to be few, what steps of other ladders were beside what was thought of them, to
                begin where those ended; those of here are added.

        Returns:
            The time that no choice is below, as far as is thought; nothing if none was found to fit.
        """
        bound: list[float] = []
        rung = self.rung(limit_bytes)
        if seen is not None:
            rung = self.rung(min(1.0, seen.share) * limit_bytes)
            if not self.may_be_faster(self.limit_bytes(rung), seen.late, below):
                return bound
        shown: set[Assignment] = set()
        surely: set[Assignment] = set()
        over, fits = -1, self.last + 1  # the lowest rung that is known to take more, the highest that fits
        # Rounds in a row on one side of the limit, and since one fitted; by how much steps are later than is thought.
        run, misses, late = 0, 0, math.inf

        def simulated(assignment: Assignment) -> Shown:
            nonlocal late
            found, thought = prove(assignment), self.seconds(assignment)
            late = min(late, found.seconds - thought)
            if seen is not None:
                seen.add(self._chooser.held_bytes(assignment), thought, found)
            return found

        while over < rung < fits:
            choice = self.choice(rung)
            thought = self.seconds(choice.assignment)
            if choice.assignment in shown and over >= 0:  # it fits, or `over` would be below
                fits, rung = rung, (over + rung) // 2
                continue
            if thought + (late if shown else 0.0) >= below * (1 - FASTER) or len(shown) == rounds:
                break
            if seen is not None and bound and misses == _MISSES:
                break
            found = simulated(choice.assignment)
            shown.add(choice.assignment)
            aim, misses = limit_bytes / found.taken_bytes, misses + 1
            if found.taken_bytes > limit_bytes:
                over, run = self.until(choice, rung), max(1, run + 1)
                aim *= 1 - _BEYOND * 4 ** (run - 1)
                surer = self.surer(choice.assignment, below - late)
                if surer is not None and surer not in shown | surely:
                    surely.add(surer)
                    sure = simulated(surer)
                    if sure.taken_bytes <= limit_bytes:
                        found, thought, aim = sure, self.seconds(surer), limit_bytes / sure.taken_bytes
                        rung = min(max(self.rung(self._chooser.held_bytes(surer)), over + 1), fits - 1)
            if found.taken_bytes <= limit_bytes:
                fits, run, misses, below = rung, min(-1, run - 1), 0, min(below, found.seconds)
                bound = [self.choice(rung).bound]
            # What a step takes need not follow what is thought of it: by halves, if it does not.
            halves = abs(run) >= _HALVES and over >= 0 and fits <= self.last
            rung = (over + fits) // 2 if halves else self.rung(self.limit_bytes(rung) * max(aim, _LEAST_AIM))
            rung = min(max(rung, over + 1), fits - 1)
            if over + 1 == fits or not USED * limit_bytes <= found.taken_bytes <= limit_bytes:
                continue
            if self.seconds(self.choice(over + 1 if over >= 0 else rung).assignment) >= (1 - WORTH) * thought:
                break
        return bound

    def surer(self, assignment: Assignment, below: float) -> Assignment | None:
        """A choice that holds less than this one and leaves an allocator fewer holes; None if that is slow."""
        found = self._chooser.uniform(assignment, self._among)
        holds_less = self._chooser.held_bytes(found) < self._chooser.held_bytes(assignment)
        return found if holds_less and self._chooser.seconds(found) < below else None

    def _solved(self, rung: int) -> Choice | None:
        if rung not in self._choices:
            self._choices[rung] = self._chooser.fastest(self.limit_bytes(rung), self._among)
        return self._choices[rung]
