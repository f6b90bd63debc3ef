"""The choices for budgets that fall by a fixed share, which no budget that is asked for has a say in."""

from __future__ import annotations

import functools
import math

from memscale.planning.solver import Choice, Chooser

# By how much a rung is below the one before: finer than what is asked of the use of a budget, and coarser than the
# solver's own distance from the best.
_STEP = 2e-3
_ROUNDING = 1 + 1e-9


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
        return max(0, math.ceil(math.log(limit_bytes / self._most_bytes) / math.log(1 - _STEP) - 1e-9))

    def limit_bytes(self, rung: int) -> float:
        """Of a rung."""
        return self._most_bytes * _ROUNDING * float((1 - _STEP) ** rung)

    def choice(self, rung: int) -> Choice:
        """The fastest that is thought to hold no more than the rung's bytes; there is one down to the last rung."""
        while rung < self.last and self._solved(rung) is None:  # the solver gave up where there is one
            rung += 1
        return self._solved(rung) or self.least

    def until(self, choice: Choice, rung: int) -> int:
        """The last rung that has this choice, which `rung` has."""
        return max(rung, self.rung(self._chooser.held_bytes(choice.assignment)) - 1)

    def seconds(self, choice: Choice) -> float:
        """What it is thought to take."""
        return self._chooser.seconds(choice.assignment)

    def _solved(self, rung: int) -> Choice | None:
        if rung not in self._choices:
            self._choices[rung] = self._chooser.fastest(self.limit_bytes(rung), self._among)
        return self._choices[rung]
