"""The search among the candidates of one step: choose by what they cost, simulate the choice, correct the costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

from memscale.algebra import Plan
from memscale.planning.candidates import Candidate, Menu, Rules
from memscale.planning.costs import Assignment, measured_costs
from memscale.planning.parts import parts_of
from memscale.planning.prediction import taken_bytes
from memscale.planning.solver import Chooser, LinkRates
from memscale.simulation import Profile, SimulatedStep

# A plan that uses this share of the budget is not worth another round.
_USED = 0.97
# Nor is one that is as fast as was thought.
_AS_THOUGHT = 1.005
_ROUNDS, _ROUNDS_WITH_MOVES = 6, 3
# Of the budget, for what a simulation may be off: 0.09 % at worst on models that it was never shown.
_MARGIN = 1e-3

#: Simulates the step with these rules, with its update or without.
Simulate = Callable[[Rules, bool], SimulatedStep]


@dataclass(frozen=True, eq=False)
class Proven:
    """A choice and the profile of the step that it makes.

    Attributes:
        search: that found it.
        assignment: the candidate of each part.
        plan: its rules.
        profile: of the simulated step.
    """

    search: Search
    assignment: Assignment
    plan: Plan
    profile: Profile

    @property
    def taken_bytes(self) -> int:
        """What the device has to give."""
        return taken_bytes(self.profile)

    @property
    def seconds(self) -> float:
        """Of the simulated step."""
        assert self.profile.step_seconds is not None, "the engine simulates on hardware with speeds"
        return self.profile.step_seconds


@dataclass(frozen=True, eq=False)
class Found:
    """The fastest plan that was found for a budget.

    Attributes:
        proven: the plan.
        bound_seconds: no choice that fits the budget is faster, as far as the costs add up, corrected by all the steps
            that were simulated.
    """

    proven: Proven
    bound_seconds: float


class Search:
    """The candidates on a menu, on top of rules that every step has.

    Args:
        model: to plan.
        simulate: its step with rules.
        menu: what may be chosen.
        always: the rules that every step has; candidates come inside them.
        link: between the device and the tier below; None if nothing moves.
        plain: the step with `always`, if that is known already.
    """

    def __init__(
        self,
        model: nn.Module,
        simulate: Simulate,
        menu: Menu,
        *,
        always: Rules = (),
        link: LinkRates | None = None,
        plain: SimulatedStep | None = None,
    ) -> None:
        self.always = always
        self.plain = plain if plain is not None else simulate(always, True)
        self._simulate = simulate
        parts = parts_of(model, self.plain)
        menus: list[tuple[Candidate, ...]] = []
        by_family: dict[object, tuple[Candidate, ...]] = {}
        for part in parts:
            if part.alike not in by_family:
                by_family[part.alike] = menu.for_part(part, self.plain)
            menus.append(by_family[part.alike])
        menus.append(menu.for_outside(model, parts))
        self.costs = measured_costs(self.plain, parts, menus, lambda rules: simulate(self._with(rules), False))
        self._chooser = Chooser(self.costs, link)
        self._moves = link is not None
        self._proofs: dict[Assignment, Proven] = {}

    def fastest(self, budget_bytes: int) -> Found | None:
        """The fastest plan whose step takes at most `budget_bytes`, None if none was found."""
        safe_bytes = int(budget_bytes * (1 - _MARGIN))
        # When copies hold a step up depends on more than the costs say: what does without them is looked for apart.
        bound = np.inf
        for moves in (False, True) if self._moves else (False,):
            bound = min(bound, self._choose(safe_bytes, moves))
        # Where nothing leaves the margin, what fits without it is better than nothing.
        for most in (safe_bytes, budget_bytes):
            if fitting := [each for each in self._proofs.values() if each.taken_bytes <= most]:
                best = min(fitting, key=lambda each: (each.seconds, each.taken_bytes, len(each.plan)))
                # A step that is faster than its costs add up to shows what they are worth as a bound.
                return Found(best, min(float(bound), best.seconds))
        return None

    def _choose(self, safe_bytes: int, moves: bool) -> float:
        """Choose and simulate until a step is what was thought of it; returns the bound of the last choice."""
        bound = np.inf
        found = self.prove(self.costs.as_it_is)
        overhead = found.taken_bytes - found.profile.peak_bytes  # what the allocator keeps beside
        for _ in range(_ROUNDS_WITH_MOVES if moves else _ROUNDS):
            choice = self._chooser.fastest(safe_bytes - overhead, moves=moves)
            if choice is None:
                break
            bound = choice.bound
            known = choice.assignment in self._proofs
            thought = self.costs.seconds(choice.assignment) + sum(self._chooser.late(choice.assignment))
            found = self.prove(choice.assignment)
            fits = found.taken_bytes <= safe_bytes
            as_thought = found.seconds <= _AS_THOUGHT * thought
            if fits and (known or (as_thought and found.taken_bytes >= _USED * safe_bytes)):
                break
            overhead = found.taken_bytes - found.profile.peak_bytes
            if known:  # it was thought to fit twice
                overhead += found.taken_bytes - safe_bytes
        return bound

    def smallest(self) -> Proven:
        """The plan with the least peak."""
        best = self.prove(self.costs.as_it_is)
        for _ in range(_ROUNDS):
            choice = self._chooser.smallest()
            if choice.assignment in self._proofs:
                break
            found = self.prove(choice.assignment)
            if found.taken_bytes >= best.taken_bytes:
                break
            best = found
        return min(self._proofs.values(), key=lambda each: (each.taken_bytes, each.seconds))

    def prove(self, assignment: Assignment) -> Proven:
        """The step under an assignment, simulated. What it holds above what was thought counts from then on."""
        if assignment not in self._proofs:
            rules = self._with(self.costs.rules(assignment))
            step = self.plain if assignment == self.costs.as_it_is else self._simulate(rules, True)
            profile = step.profile()
            self._proofs[assignment] = Proven(self, assignment, Plan(rules), profile)
            self._correct(assignment, step, profile)
        return self._proofs[assignment]

    def _with(self, rules: Rules) -> Rules:
        # A later rule composes outside an earlier one.
        return (*rules, *self.always)

    def _correct(self, assignment: Assignment, step: SimulatedStep, profile: Profile) -> None:
        found = step.attribution([part.path for part in self.costs.parts])
        held = dict(zip(found.stations, (found.held_bytes.sum(axis=0) - found.slack_bytes).tolist(), strict=True))
        thought = self.costs.held_bytes(assignment)
        for at, station in enumerate(self.costs.stations):
            if station in held:
                self._chooser.beside_bytes[assignment[-1], at] = held[station] - thought[at]
        waits = profile.exposed_seconds
        shown = (waits.get("room", 0.0), waits.get("input", 0.0) + waits.get("disk", 0.0))
        self._chooser.late_seconds = tuple(
            known + max(0.0, real - thought)
            for known, real, thought in zip(
                self._chooser.late_seconds, shown, self._chooser.late(assignment), strict=True
            )
        )
