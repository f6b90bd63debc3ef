"""The search among the candidates of one step: choose by what they cost, simulate the choice, correct the costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

from memscale.algebra import Plan
from memscale.planning.candidates import Candidate, Menu, Rules
from memscale.planning.costs import Assignment, Bytes, measured_costs
from memscale.planning.parts import parts_of
from memscale.planning.prediction import taken_bytes
from memscale.planning.solver import Chooser, Floats, LinkRates
from memscale.planning.trials import Trials
from memscale.simulation import Profile, SimulatedStep

# A plan that uses this share of the budget is not worth another round.
_USED = 0.97
# Nor is one that is as fast as was thought; of copies less is known.
_AS_THOUGHT, _AS_THOUGHT_WITH_MOVES = 1.005, 1.02
_ROUNDS, _ROUNDS_WITH_MOVES = 6, 8
# A smallest plan that holds no more than this share of what was thought to be the least is it.
_LEAST = 1.005
# Of the budget, for what a simulation may be off: 0.09 % at worst on models that it was never shown.
_MARGIN = 1e-3


def leaves_margin(taken_bytes: int, budget_bytes: int) -> bool:
    """Whether a step that takes so much by its simulation fits the budget on a device, too."""
    return taken_bytes <= int(budget_bytes * (1 - _MARGIN))


_LOOKS = 3
# A step of very many operators (a model that loops over time in Python) takes minutes to simulate: of such few choices
# are tried, counted in operators, since a limit in seconds would make the plan depend on the machine.
_MOST_OPERATORS, _FEWEST = 500_000, 2

#: Simulates the step with these rules, with its update or without; of the model without the parts at these paths.
Simulate = Callable[[Rules, bool, frozenset[str]], SimulatedStep]
_WHOLE: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Proven:
    """A choice and the profile of the step that it makes.

    Attributes:
        search: that found it.
        assignment: the candidate of each part.
        plan: its rules.
        profile: of the simulated step.
        held_bytes: [station of the costs] the most that is held there, what was thought where the step never came.
        part_seconds: [part] of the operators of each part's forward and backward; last of what is outside.
    """

    search: Search
    assignment: Assignment
    plan: Plan
    profile: Profile
    held_bytes: Bytes
    part_seconds: Floats

    @property
    def taken_bytes(self) -> int:
        """What the device has to give."""
        return taken_bytes(self.profile)

    @property
    def seconds(self) -> float:
        """Of the simulated step."""
        assert self.profile.step_seconds is not None, "the engine simulates on hardware with speeds"
        return self.profile.step_seconds

    def correct(self, chooser: Chooser) -> None:
        """Let the chooser know what this step held and took."""
        chooser.correct(self.assignment, self.held_bytes, self.part_seconds, self.seconds)


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
        trials: what another search of this step has tried.

    Attributes:
        menu, always: as given.
        trials: what was tried.
        patience: at most so many simulations for trials, and so many for the choices of each search.
        notes: what is not known for want of it.
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
        trials: Trials | None = None,
    ) -> None:
        self.menu, self.always = menu, always
        self.trials = {} if trials is None else dict(trials)
        self.plain = plain if plain is not None else simulate(always, True, _WHOLE)
        self._simulate = simulate
        operators = self.plain.last_operators
        self.patience = max(_FEWEST, _MOST_OPERATORS // max(1, operators))
        parts = parts_of(model, self.plain, tiles=menu.tiles)
        menus: list[tuple[Candidate, ...]] = []
        by_family: dict[object, tuple[Candidate, ...]] = {}
        for part in parts:
            if part.alike not in by_family:
                by_family[part.alike] = menu.for_part(part, self.plain)
            menus.append(by_family[part.alike])
        menus.append(menu.for_outside(model, parts))
        self.costs = measured_costs(
            self.plain,
            parts,
            menus,
            lambda rules, away: simulate(self._with(rules), False, away),
            self.trials,
            most=self.patience,
        )
        self.notes: tuple[str, ...] = ()
        if self.patience < _ROUNDS:
            self.notes = (
                f"a step of {operators} operators takes long to simulate, so that {self.patience} choices were tried; "
                "one that was not may be better",
            )
        self._link = link
        self._proofs: dict[Assignment, Proven] = {}
        self._least: Proven | None = None

    def fastest(self, budget_bytes: int) -> Found | None:
        """The fastest plan whose step takes at most `budget_bytes`, None if none was found."""
        safe_bytes = int(budget_bytes * (1 - _MARGIN))
        # When copies hold a step up depends on more than the costs say: what does without them is looked for apart.
        # Steps for other budgets correct nothing here: a budget has the same plan, whatever was asked before.
        chooser = Chooser(self.costs, self._link)
        bound = min(self._choose(chooser, safe_bytes, moves) for moves in ((False, True) if self._link else (False,)))
        if not any(each.taken_bytes <= budget_bytes for each in self._proofs.values()):
            self.smallest()
        # Where nothing leaves the margin, what fits without it is better than nothing.
        for most in (safe_bytes, budget_bytes):
            if fitting := [each for each in self._proofs.values() if each.taken_bytes <= most]:
                best = min(fitting, key=lambda each: (each.seconds, each.taken_bytes, len(each.plan)))
                # A step that is faster than its costs add up to shows what they are worth as a bound.
                return Found(best, min(bound, best.seconds))
        return None

    def _choose(self, chooser: Chooser, safe_bytes: int, moves: bool) -> float:
        """Choose and simulate until a step is what was thought of it; returns the bound of the last choice."""
        bound = np.inf
        found = self.prove(self.costs.as_it_is)
        found.correct(chooser)
        seen: set[Assignment] = set()
        overhead = found.taken_bytes - found.profile.peak_bytes  # what the allocator keeps beside
        spare = misses = 0  # what choices that turned out not to fit lacked, and how many there were
        for _ in range(min(self.patience, _ROUNDS_WITH_MOVES if moves else _ROUNDS)):
            choice = chooser.fastest(safe_bytes - overhead - spare, moves=moves)
            if choice is None and misses:
                # What some choices were seen to hold is not held by all: back to what was thought, with room to spare.
                chooser.forget()
                self.prove(self.costs.as_it_is).correct(chooser)
                lacked, misses = found.taken_bytes - safe_bytes, 0
                for room in (lacked, lacked // 2, lacked // 4):
                    choice = choice or chooser.fastest(safe_bytes - room, moves=moves)
                choice = None if choice is not None and choice.assignment in seen else choice
            if choice is None:
                break
            bound = choice.bound
            known = choice.assignment in seen
            thought = chooser.seconds(choice.assignment)
            found = self.prove(choice.assignment)
            found.correct(chooser)
            seen.add(choice.assignment)
            kept = found.taken_bytes - found.profile.peak_bytes
            lacked = found.taken_bytes - safe_bytes
            if lacked <= 0:
                as_thought = found.seconds <= (_AS_THOUGHT_WITH_MOVES if moves else _AS_THOUGHT) * thought
                if known or (as_thought and found.taken_bytes >= _USED * safe_bytes):
                    break
                overhead, spare = kept, 0
                continue
            # What it holds is known now. What an allocator keeps depends on what is chosen, and of what is chosen next
            # more was not foreseen.
            misses += 1
            overhead = max(overhead, kept)
            spare += lacked if known or misses > 1 else 0
        return bound

    def smallest(self) -> Proven:
        """The plan with the least peak."""
        if self._least is None:
            chooser = Chooser(self.costs, self._link)
            self.prove(self.costs.as_it_is).correct(chooser)
            seen: set[Assignment] = set()
            for _ in range(min(self.patience, _ROUNDS)):
                choice = chooser.smallest()
                if choice.assignment in seen:
                    break
                seen.add(choice.assignment)
                found = self.prove(choice.assignment)
                found.correct(chooser)
                if found.profile.peak_bytes <= _LEAST * choice.bound:
                    break
            # Many choices may hold as little: of these the fastest, and what looks for it may find a smaller one.
            for _ in range(min(self.patience, _LOOKS)):
                least = min(self._proofs.values(), key=lambda each: each.taken_bytes)
                faster = chooser.fastest(least.profile.peak_bytes)
                if faster is None or faster.assignment in self._proofs:
                    break
                self.prove(faster.assignment).correct(chooser)
        self._least = min(self._proofs.values(), key=lambda each: (each.taken_bytes, each.seconds))
        return self._least

    def prove(self, assignment: Assignment) -> Proven:
        """The step under an assignment, simulated."""
        if assignment not in self._proofs:
            rules = self._with(self.costs.rules(assignment))
            step = self.plain if assignment == self.costs.as_it_is else self._simulate(rules, True, _WHOLE)
            found = step.attribution([part.path for part in self.costs.parts])
            held = dict(zip(found.stations, (found.held_bytes.sum(axis=0) - found.slack_bytes).tolist(), strict=True))
            thought = self.costs.held_bytes(assignment).tolist()
            known = [held.get(station, each) for station, each in zip(self.costs.stations, thought, strict=True)]
            self._proofs[assignment] = Proven(
                self,
                assignment,
                Plan(rules),
                step.profile(),
                np.array(known, dtype=np.int64),
                found.seconds[:, :2].sum(axis=1),
            )
        return self._proofs[assignment]

    def _with(self, rules: Rules) -> Rules:
        # A later rule composes outside an earlier one.
        return (*rules, *self.always)
