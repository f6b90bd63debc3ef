"""`ChoiceGrid`: the choices that a search may simulate, for the limits of a grid that is the same for every budget."""

from __future__ import annotations

import functools
import math
from collections import Counter

from memscale.core import template
from memscale.planning.search.effort import Effort
from memscale.planning.search.found import Proven
from memscale.planning.solving.solver import Choice, Chooser, LinkRates
from memscale.planning.trials.costs import GROUPED, Assignment, Costs
from memscale.planning.trials.trial_rows import MOVES

#: The share between two limits of the grid: benchmarks/bench_plan.py, share of the budget.
STEP = 2e-3
# Share of the step as written: the most that the allocator is estimated to reserve beyond the allocated bytes:
# benchmarks/bench_card.py has both.
_KEPT = 0.1


class ChoiceGrid:
    """The choices of one search, each found once.

    Args:
        costs: the costs of all candidates.
        link: the link to the tier below the device; None if no candidate may move bytes.
        as_it_is: the step as written.
        effort: how many steps the search simulates.

    Attributes:
        sets: the sets of techniques to search one after the other: without moves, all, and all without groups. A set
            with moves or groups may miss the best plan of a smaller set, since costs of moves and groups add up less
            exactly.
        chooser: the chooser that is corrected by the step as written.
    """

    def __init__(self, costs: Costs, link: LinkRates | None, as_it_is: Proven, effort: Effort) -> None:
        self._costs, self._link, self._as_it_is, self._effort = costs, link, as_it_is, effort
        used = frozenset(each for menu in costs.candidates for candidate in menu for each in candidate.techniques)
        grouped = GROUPED if costs.groups else frozenset()
        self.sets = list(dict.fromkeys([(used | grouped) - MOVES, used | grouped, used]))
        self.chooser = self.new_chooser()
        self._found: dict[tuple[frozenset[str], int], Choice | None] = {}
        self._least: dict[frozenset[str], Choice] = {}

    def new_chooser(self) -> Chooser:
        """Returns a chooser that is corrected by the step as written, and may be corrected further."""
        chooser = Chooser(self._costs, self._link)
        # Bytes reserved beyond the allocated are capped: they are due to large tensors, which planned steps may lack.
        self._as_it_is.correct(chooser, int(_KEPT * self._as_it_is.taken_bytes))
        return chooser

    def number(self, limit_bytes: float) -> int:
        """Returns the number of the first limit of the grid that is at most `limit_bytes`."""
        share = max(1, limit_bytes) / self._as_it_is.taken_bytes
        return max(0, math.ceil(math.log(share) / math.log(1 - STEP) - 1e-9))

    def last(self, among: frozenset[str]) -> int:
        """Returns the number of the last limit for which a choice among these techniques exists."""
        return max(0, self.number(self.chooser.held_bytes(self.least(among).assignment)) - 1)

    def least(self, among: frozenset[str]) -> Choice:
        """Returns the choice with the smallest estimate."""
        if among not in self._least:
            self._least[among] = self.chooser.smallest(among)
        return self._least[among]

    def fastest(self, number: int, among: frozenset[str]) -> Choice:
        """Returns the fastest choice whose estimate is at most this limit of the grid."""
        if (among, number) not in self._found:
            limit_bytes = self._as_it_is.taken_bytes * (1 + 1e-9) * (1 - STEP) ** number
            # The fastest choice with groups is also the fastest without, if it changes no group.
            with_groups = among | GROUPED
            found = self.fastest(number, with_groups) if with_groups != among and with_groups in self.sets else None
            if found is None or self._costs.covered(found.assignment):
                found = self.chooser.fastest(limit_bytes, among)
            self._found[among, number] = found
        return self._found[among, number] or self.least(among)  # None: the solver found no choice

    @functools.cached_property
    def alike(self) -> list[Assignment]:
        """Returns the choices with one candidate for all blocks or for the whole model, as a plan by hand would have.

        The costs of one block's trial say little about the waits for the link, and the fragmentation, when all blocks
        have the candidate: such choices may be faster than their estimate. Only the solver observes the cap of the
        link's tier.
        """
        paths, menus = self._costs.paths, self._costs.candidates
        count = Counter(map(template, paths))
        blocks = [row for row, path in enumerate(paths) if count[template(path)] > 1]
        whole = [row for row in self._costs.groups if self._effort.is_short and not self._costs.parts[row].path]
        found: dict[Assignment, None] = {}
        for rows in (blocks, whole):
            for kind in dict.fromkeys(each for row in rows for each in menus[row][1:]):
                if self._link is None or self._link.cap_bytes is None or not kind.techniques & MOVES:
                    chosen = {row: menus[row].index(kind) for row in rows if kind in menus[row]}
                    found[tuple(chosen.get(row, 0) for row in range(len(menus)))] = None
        if self._effort.is_long:  # it has simulations to spare for the smallest of them alone
            return sorted(found, key=self.chooser.held_bytes)[: self._effort.trials]
        return list(found)
