"""The results of a search: `Proven`, a choice with its simulated step, and `Found`, the fastest plan for a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memscale.algebra import Plan
from memscale.planning.parts.candidates import Menu, Rules
from memscale.planning.solving.program import Floats
from memscale.planning.solving.solver import Chooser
from memscale.planning.trials.costs import Assignment, Bytes, Costs
from memscale.simulation import Phase, Profile


@dataclass(frozen=True, eq=False)
class Proven:
    """A choice with the profile of its simulated step.

    Attributes:
        costs, menu, always: the attributes of the search that made the choice.
        assignment: the number of the candidate of each part.
        plan: the rules of the assignment.
        profile: the profile of the simulated step.
        operators: the number of operators of the simulated step.
        held_bytes: [interval of the costs] the most bytes held; the estimate at intervals that the step did not reach.
        part_seconds: [part] seconds of the part's operators, forward and backward; 0 for groups. The last entry is for
            the rest of the model.
    """

    costs: Costs
    menu: Menu
    always: Rules
    assignment: Assignment
    plan: Plan
    profile: Profile
    operators: int
    held_bytes: Bytes
    part_seconds: Floats

    @property
    def taken_bytes(self) -> int:
        """Returns the bytes that the device must have free for the step."""
        return self.profile.taken_bytes

    @property
    def seconds(self) -> float:
        """Returns the seconds of the simulated step."""
        assert self.profile.step_seconds is not None, "the engine simulates on hardware with speeds"
        return self.profile.step_seconds

    @property
    def preference(self) -> tuple[float, int, int, int]:
        """Returns the sort key of choices, the best first: seconds, then bytes, rules, and the length of the plan.

        Seconds are rounded to 12 digits: sums of the same terms in different orders are equal to 12 digits.
        """
        return float(f"{self.seconds:.12g}"), self.taken_bytes, len(self.plan), len(repr(self.plan))

    def correct(self, chooser: Chooser, most_kept_bytes: int | None = None) -> None:
        """Corrects the chooser by this step, including the bytes that the allocator reserves beyond the allocated.

        These bytes are added at forward and backward, not at the update: during the update, the allocator reserves
        blocks that forward and backward left. Added to an update that no choice makes smaller, these bytes would rule
        out all choices that stream no parameters.

        Args:
            chooser: the chooser to correct.
            most_kept_bytes: the most of these bytes to add; None adds all.
        """
        kept = self.taken_bytes - self.profile.peak_bytes
        kept = kept if most_kept_bytes is None else min(kept, most_kept_bytes)
        leaves = np.array([interval.phase is not Phase.OPTIMIZER for interval in chooser.costs.intervals])
        chooser.correct(self.assignment, self.held_bytes + kept * leaves, self.part_seconds, self.seconds)


@dataclass(frozen=True, eq=False)
class Found:
    """The fastest plan found for a budget.

    Attributes:
        proven: the plan, with its simulated step.
        bound_seconds: a lower bound of the seconds of all choices within the budget, by the sum of the costs, corrected
            by simulated steps.
        simulations: the number of simulated steps, without the step as written.
    """

    proven: Proven
    bound_seconds: float
    simulations: int


def fastest_of(found: Sequence[Found]) -> Found | None:
    """Returns the fastest of the results of several searches for one budget; None for no results."""
    best = min((each.proven for each in found), key=lambda each: each.preference, default=None)
    if best is None:
        return None
    return Found(best, min(each.bound_seconds for each in found), sum(each.simulations for each in found))


def smallest_of(found: Sequence[Found], enough_bytes: int = 0) -> Found:
    """Returns the smallest of the results of several searches; the fastest of those with at most `enough_bytes`."""
    best = min((each.proven for each in found), key=lambda each: (max(each.taken_bytes, enough_bytes), each.seconds))
    return Found(best, best.seconds, sum(each.simulations for each in found))
