"""What a search has shown: the step of a choice, simulated, and the fastest plan for a budget."""

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
    """A choice and the profile of the step that it makes.

    Attributes:
        costs, menu, always: of the search that found it.
        assignment: the candidate of each part.
        plan: its rules.
        profile: of the simulated step.
        held_bytes: [interval of the costs] the most that is held there, what was thought where the step never came.
        part_seconds: [part] of the operators of each part's forward and backward, 0 of groups; last of what is outside.
    """

    costs: Costs
    menu: Menu
    always: Rules
    assignment: Assignment
    plan: Plan
    profile: Profile
    held_bytes: Bytes
    part_seconds: Floats

    @property
    def taken_bytes(self) -> int:
        """What the device has to give."""
        return self.profile.taken_bytes

    @property
    def seconds(self) -> float:
        """Of the simulated step."""
        assert self.profile.step_seconds is not None, "the engine simulates on hardware with speeds"
        return self.profile.step_seconds

    @property
    def preference(self) -> tuple[float, int, int, int]:
        """The less, the better: its time, and of as fast ones what it takes, how many rules it has, how much they do.

        Times are sums, which are equal to 12 digits where the order of their terms alone differs.
        """
        return float(f"{self.seconds:.12g}"), self.taken_bytes, len(self.plan), len(repr(self.plan))

    def correct(self, chooser: Chooser, most_kept_bytes: int | None = None) -> None:
        """Let the chooser know what this step took, with what the allocator kept beside, `most_kept_bytes` of it.

        Beside forward and backward: what it keeps while the optimizer steps is of blocks that these left. On top of an
        update that no choice makes smaller it would rule out all that streams no parameters.
        """
        kept = self.taken_bytes - self.profile.peak_bytes
        kept = kept if most_kept_bytes is None else min(kept, most_kept_bytes)
        leaves = np.array([interval.phase is not Phase.OPTIMIZER for interval in chooser.costs.intervals])
        chooser.correct(self.assignment, self.held_bytes + kept * leaves, self.part_seconds, self.seconds)


@dataclass(frozen=True, eq=False)
class Found:
    """The fastest plan that was found for a budget.

    Attributes:
        proven: the plan.
        bound_seconds: no choice that fits the budget is faster, as far as the costs add up, corrected by the steps that
            were simulated.
        simulations: the steps that were simulated to find it, but for the step as it is.
    """

    proven: Proven
    bound_seconds: float
    simulations: int


def fastest_of(found: Sequence[Found]) -> Found | None:
    """The fastest of what several searches found for one budget, None if they found nothing."""
    best = min((each.proven for each in found), key=lambda each: each.preference, default=None)
    if best is None:
        return None
    return Found(best, min(each.bound_seconds for each in found), sum(each.simulations for each in found))


def smallest_of(found: Sequence[Found], enough_bytes: int = 0) -> Found:
    """The smallest of what several searches found; of those that take no more than `enough_bytes` the fastest."""
    best = min((each.proven for each in found), key=lambda each: (max(each.taken_bytes, enough_bytes), each.seconds))
    return Found(best, best.seconds, sum(each.simulations for each in found))
