"""The search among the candidates of one step: choose by what they cost, simulate the choice, correct the costs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from torch import nn

from memscale.algebra import Plan
from memscale.planning.parts.candidates import Candidate, Menu, Rules
from memscale.planning.parts.groups import groups_of
from memscale.planning.parts.parts import Part, parts_of
from memscale.planning.search.alike import moving_alike
from memscale.planning.search.foreseen import foresee
from memscale.planning.search.found import Found, Proven
from memscale.planning.search.halving import halve
from memscale.planning.search.ladder import FASTER, Ladder, Seen
from memscale.planning.search.shrinking import reaches, shrink
from memscale.planning.solving.solver import Chooser, LinkRates
from memscale.planning.trials.costs import GROUPED, Assignment, Costs, measured_costs
from memscale.planning.trials.estimates import Estimates
from memscale.planning.trials.groups import shown_bytes, with_groups
from memscale.planning.trials.trial_rows import MOVES
from memscale.planning.trials.trials import Trials
from memscale.simulation import Ledger, SimulatedStep

# Choices that are simulated for a budget: what moves interacts more, and takes more of them.
_ROUNDS, _ROUNDS_WITH_MOVES = 6, 8
# Of the step as it is, what the allocator is thought to keep beside what is allocated, at most.
_KEPT = 0.1
# Of the budget, for what a simulation may be off: 0.09 % at worst on models that it was never shown.
_MARGIN = 1e-3


def leaves_margin(taken_bytes: int, budget_bytes: int) -> bool:
    """Whether a step that takes so much by its simulation fits the budget on a device, too."""
    return taken_bytes <= int(budget_bytes * (1 - _MARGIN))


# Small plans are looked for among the first so many sets of techniques.
_SMALL = 2
# A step of very many operators (a model that loops over time in Python) takes minutes to simulate: of such few choices
# are tried, counted in operators, since a limit in seconds would make the plan depend on the machine.
_MOST_OPERATORS, _FEWEST = 500_000, 2
# Where a step takes a second or more to simulate, what one set of techniques has shown says where to look among others.
_MANY_OPERATORS = 2_000

# Of the budget: where all steps of a set of techniques took more, small plans of it are not looked for.
_SURELY = 1.02
# What is estimated to reserve more than so much of the budget, by whether something moves, and a segment does not fit.
# Of what steps of GPT-2 take estimates were 1.025 at most, of a ResNet of 190 MiB that segment more (1.12), and
# 1.19 where a ViT offloads.
_OFF, _SEGMENT_BYTES = {False: 1.02, True: 1.2}, 20 << 20
# Of the budget: what moves and is thought to hold more does take more. Of four blocks that a T4 offloads 1.3 was
# thought, since one that is tried beside others frees less than all of them together, and the step took 0.98.
_HARDLY = 1.35

#: Simulates the step with these rules, with its update or without; of the model without the parts at these paths.
Simulate = Callable[[Rules, bool, frozenset[str]], SimulatedStep]
_WHOLE: frozenset[str] = frozenset()


class Search:
    """The candidates on a menu, on top of rules that every step has.

    What candidates cost is found with all that are on the menu, whichever of them may be chosen: a choice among few
    techniques is then looked for, with the same costs, wherever more are allowed.

    Args:
        model: to plan.
        simulate: its step with rules.
        menu: what may be chosen.
        always: the rules that every step has; candidates come inside them.
        link: between the device and the tier below; None if nothing moves.
        plain: the step with `always`, if that is known already.
        trials: what another search of this step has tried.
        loop_share: see `memscale.planning.stepping.loop_share`.

    Attributes:
        menu, always: as given.
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
        loop_share: float = 1.0,
    ) -> None:
        self.menu, self.always = menu, always
        self._model = model
        self._trials = {} if trials is None else dict(trials)
        self.plain = plain if plain is not None else simulate(always, True, _WHOLE)
        self._simulate = simulate
        operators = self.plain.last_operators
        self.patience = max(_FEWEST, _MOST_OPERATORS // max(1, operators))
        self.notes: tuple[str, ...] = ()
        if self.patience < _ROUNDS:
            self.notes = (
                f"a step of {operators} operators takes long to simulate, so that {self.patience} choices were tried; "
                "one that was not may be better",
            )
        self._link, self._loop_share = link, loop_share
        self._proofs: dict[Assignment, Proven] = {}
        self._ladders: dict[frozenset[str], Ladder] = {}
        self._small: dict[tuple[frozenset[str], int], dict[Assignment, Proven]] = {}

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """What is decided about."""
        return parts_of(self._model, self.plain, tiles=self.menu.tiles)

    @functools.cached_property
    def costs(self) -> Costs:
        """Of all candidates, from simulated steps."""
        menus: list[tuple[Candidate, ...]] = []
        by_family: dict[object, tuple[Candidate, ...]] = {}
        for part in self.parts:
            if part.alike not in by_family:
                by_family[part.alike] = self.menu.for_part(part, self.plain)
            menus.append(by_family[part.alike])
        menus.append(self.menu.for_outside(self._model, self.parts))

        def simulate(rules: Rules, away: frozenset[str]) -> SimulatedStep:
            return self._simulate(self._with(rules), False, away)

        def menu_of(group: Part) -> tuple[Candidate, ...]:
            return self.menu.for_group(group, [part.path for part in self._inside(group)], self.plain)

        most, trials = self.patience, self._trials
        found = measured_costs(self.plain, self.parts, menus, simulate, trials, most=most, loop_share=self._loop_share)
        if most < _ROUNDS:
            return found
        groups = groups_of(self._model, self.plain, self.parts)
        return with_groups(found, self.plain, groups, menu_of, simulate, trials, most=most)

    def _inside(self, group: Part) -> list[Part]:
        return [self.parts[row] for row in group.members if row < len(self.parts)]

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Of what an allocator reserves for a choice."""

        def whole(assignment: Assignment) -> Ledger:
            return self._whole(assignment).ledger

        return Estimates(self.costs, self.trials, self.plain.clock.hardware, whole)

    @property
    def trials(self) -> Trials:
        """What was tried."""
        assert self.costs, "costs are found by trials"
        return self._trials

    @property
    def shown(self) -> list[Proven]:
        """All choices whose steps were simulated, also by the searches inside it."""
        inner = [each for name in ("uncut", "finer") if (each := vars(self).get(name)) is not None]
        return [*self._proofs.values(), *(proven for each in inner for proven in each.shown)]

    def least(self, among: frozenset[str]) -> Proven:
        """The choice of these techniques that is thought to take the least, without those that move more than it must:
        one simulation, where `smallest` takes many.
        """
        if self.uncut is not None and "tile" not in among:
            return self.uncut.least(among)
        subset = self._subsets(self.menu.with_own(among))[0]
        return self.prove(self._ladder(subset).least.assignment)

    def fastest(self, budget_bytes: int, among: frozenset[str], below_seconds: float = np.inf) -> Found | None:
        """The fastest plan of these techniques whose step takes at most `budget_bytes`, None if none was found; if
        there is another one that takes `below_seconds`, none that is not faster is looked for.
        """
        if self.uncut is not None and "tile" not in among:
            return self.uncut.fastest(budget_bytes, among, below_seconds)
        among = self.menu.with_own(among)
        safe_bytes = int(budget_bytes * (1 - _MARGIN))
        # Steps for other budgets have no say here: a budget has the same plan, whatever was asked before.
        tried = {self.costs.as_it_is: self.prove(self.costs.as_it_is)}
        passed: dict[Assignment, int] = {}  # what was not simulated, since it is estimated to take so much more
        bounds = []
        seen: dict[frozenset[str], Seen] = {}  # by what moves
        for subset in self._subsets(among):
            known = seen.setdefault(subset & MOVES, Seen()) if self._is_large else None
            bounds += self._descend(subset, safe_bytes, tried, passed, below_seconds, known)
        if below_seconds == np.inf:
            tried |= self._small_ones(self._ask_small(among, safe_bytes, tried, passed))
        for alike in self._moving_alike(among):
            best = self._best(tried, safe_bytes)
            below = below_seconds if best is None else min(below_seconds, best.seconds)
            is_fast = self._ladder(among).seconds(alike) < below * (1 - FASTER)
            if is_fast and not self._is_too_large(alike, safe_bytes):
                tried[alike] = self.prove(alike)
        found: list[Found] = []
        # Where nothing leaves the margin, what fits without it is better than nothing.
        for most in (safe_bytes, budget_bytes):
            if not found and (best := self._best(tried, most)):
                # A step that is faster than its costs add up to shows what they are worth as a bound.
                found.append(Found(best, min([best.seconds, *bounds]), among))
        if not found and below_seconds == np.inf and "tile" in among and self.finer is not None:
            found += filter(None, [self.finer.fastest(budget_bytes, among)])
        if self._asks_uncut and self.uncut is not None:
            below = min([below_seconds, *(each.proven.seconds for each in found)])
            found += filter(None, [self.uncut.fastest(budget_bytes, among - {"tile"}, below)])
        if not found:
            return None
        best = min((each.proven for each in found), key=lambda each: each.preference)
        return Found(best, min(each.bound_seconds for each in found), among)

    @functools.cached_property
    def uncut(self) -> Search | None:
        """The search among what does not cut rows, if that takes the model apart in another way: where a loss head may
        be cut, what is around it is no part.
        """
        if not self.menu.tiles or [part.path for part in self.parts] == [
            part.path for part in parts_of(self._model, self.plain)
        ]:
            return None
        return self._other(dataclasses.replace(self.menu, techniques=self.menu.techniques - {"tile"}), None)

    @property
    def _asks_uncut(self) -> bool:
        return self.patience >= _ROUNDS and self.uncut is not None

    @functools.cached_property
    def finer(self) -> Search | None:
        """The search with candidates that cut finer; None where there are none."""
        menu = dataclasses.replace(self.menu, fine=True)
        if self.patience < _ROUNDS or all(
            len(menu.for_part(part, self.plain)) == len(self.menu.for_part(part, self.plain)) for part in self.parts
        ):
            return None
        return self._other(menu, self.trials)

    def _other(self, menu: Menu, trials: Trials | None) -> Search:
        """The search of the same step for another menu."""
        return Search(
            self._model,
            self._simulate,
            menu,
            always=self.always,
            link=self._link,
            plain=self.plain,
            trials=trials,
            loop_share=self._loop_share,
        )

    def _subsets(self, among: frozenset[str]) -> list[frozenset[str]]:
        """The sets of techniques to choose among, one after the other.

        What many techniques do together is not always what was thought of them, and the choices among more may prove
        to be slower than those among fewer. With these beside them more techniques do not make a plan slower.
        """
        there = among & frozenset(
            each for menu in self.costs.candidates for candidate in menu for each in candidate.techniques
        )
        # Activations move before parameters do: both have one name in a config.
        names = sorted(there - {"stream", "cast"})
        sets = {
            frozenset(chosen) | (there & {"stream", "cast"} if "offload" in chosen else there & {"cast"})
            for size in range(1, len(names) + 1)
            for chosen in itertools.combinations(names, size)
        }
        if self.menu.fine or (self._asks_uncut and "tile" in there):  # another search is asked about the others
            sets = {each for each in sets if "tile" in each}
        # First without what moves, of which more is known before it is tried.
        widest = there - MOVES
        found = sorted(sets, key=lambda each: (each != widest, -len(each), sorted(each))) or [there]
        if self.costs.groups:  # so it is with what is done to groups
            found = [each for at, few in enumerate(found) for each in (few | GROUPED, few)[: 1 + (at < _SMALL)]]
        return found if self.patience >= _ROUNDS else found[:2]

    def _small_subsets(self, among: frozenset[str]) -> list[frozenset[str]]:
        """Those of which small plans are looked for."""
        return self._subsets(among)[: 2 * _SMALL if self.costs.groups else _SMALL]

    def _best(self, tried: Mapping[Assignment, Proven], most_bytes: int) -> Proven | None:
        fitting = [each for each in tried.values() if each.taken_bytes <= most_bytes]
        return min(fitting, key=lambda each: each.preference, default=None)

    def _descend(
        self,
        among: frozenset[str],
        safe_bytes: int,
        tried: dict[Assignment, Proven],
        passed: dict[Assignment, int],
        below: float,
        seen: Seen | None,
    ) -> list[float]:
        """Simulate choices among these techniques for a budget.

        What those of other techniques took has no say in where to look, only in whether it is worth a simulation.

        Args:
            among: the techniques.
            safe_bytes: what a step may take.
            tried: the choices for this budget; those of here are added.
            passed: those that were not simulated, with what they are estimated to take; those of here are added.
            below: the time of a step that is known besides; what is not thought to be faster is not simulated.
            seen: as in `Ladder.look`, of techniques that move the same.

        Returns:
            The time that no choice is below, as far as is thought; nothing if none was found to fit.
        """
        fitting = self._best(tried, safe_bytes)
        below = below if fitting is None else min(below, fitting.seconds)
        rounds = min(self.patience, _ROUNDS_WITH_MOVES if among & MOVES else _ROUNDS)

        def prove(assignment: Assignment) -> Proven:
            tried[assignment] = self.prove(assignment)
            return tried[assignment]

        if self._reserves and self._is_large:
            estimate = self.estimates.reserved_bytes
            return foresee(self._ladder(among), estimate, prove, safe_bytes, below, rounds, seen or Seen())
        if self._reserves:

            def is_too_large(assignment: Assignment) -> bool:
                if self._is_too_large(assignment, safe_bytes):
                    passed[assignment] = self.estimates.reserved_bytes(assignment)
                return assignment in passed

            return halve(self._ladder(among), prove, is_too_large, safe_bytes, below, rounds)
        return self._ladder(among).look(prove, safe_bytes, below, rounds, seen)

    def _is_too_large(self, assignment: Assignment, safe_bytes: int) -> bool:
        """Whether its step is estimated to take so much more that it need not be simulated."""
        if not self._reserves or self.costs.streams(assignment):  # to estimate a first one that streams is a simulation
            return False
        moves = any(self.costs.techniques(row, number) & MOVES for row, number in enumerate(assignment))
        return self.estimates.reserved_bytes(assignment) > _OFF[moves] * safe_bytes + _SEGMENT_BYTES

    @property
    def _is_large(self) -> bool:
        return self.plain.last_operators >= _MANY_OPERATORS

    @property
    def _reserves(self) -> bool:
        """Whether the device's allocator reserves memory in segments."""
        return self.prove(self.costs.as_it_is).profile.reserved_peak_bytes is not None

    def _ladder(self, among: frozenset[str]) -> Ladder:
        if among not in self._ladders:
            most_bytes = self.prove(self.costs.as_it_is).taken_bytes
            self._ladders[among] = Ladder(self._chooser(), most_bytes, among)
        return self._ladders[among]

    def _chooser(self) -> Chooser:
        """One that knows of the step as it is."""
        chooser, as_it_is = Chooser(self.costs, self._link), self.prove(self.costs.as_it_is)
        # What an allocator keeps beside the largest tensors says little of steps that do without them.
        as_it_is.correct(chooser, int(_KEPT * as_it_is.taken_bytes))
        return chooser

    def smallest(self, among: frozenset[str], floor_bytes: int = 0) -> Proven:
        """The plan of these techniques with the least peak; one that holds `floor_bytes`, which all do, is it.

        What an allocator keeps beside that differs by a few percent from plan to plan, and is not what is looked for
        where the floor is told.
        """
        if self.uncut is not None and "tile" not in among:
            return self.uncut.smallest(among, floor_bytes)
        among = self.menu.with_own(among)
        found = list(self._small_ones(self._small_subsets(among), floor_bytes).values())
        if "tile" in among and not reaches(found, floor_bytes) and self.finer is not None:
            found.append(self.finer.smallest(among, floor_bytes))
        if not reaches(found, floor_bytes) and self._asks_uncut and self.uncut is not None:
            found.append(self.uncut.smallest(among - {"tile"}, floor_bytes))
        return min(found, key=lambda each: (each.taken_bytes, each.seconds))

    def _ask_small(
        self,
        among: frozenset[str],
        safe_bytes: int,
        tried: Mapping[Assignment, Proven],
        passed: Mapping[Assignment, int],
    ) -> list[frozenset[str]]:
        """Of which techniques small plans may be faster than the best for a budget: as a smaller one would be given, or
        since all that is on their ladder is thought to take more, so that nothing of it was simulated."""
        small, best = self._small_subsets(among), self._best(tried, safe_bytes)

        def may_be_faster(subset: frozenset[str], best: Proven) -> bool:
            ladder = self._ladder(subset)
            least = ladder.least.assignment
            if best.seconds * (1 - FASTER) <= ladder.seconds(least):
                return False
            if ladder.last <= ladder.rung(safe_bytes):
                most = (_HARDLY if subset & MOVES else _SURELY) * safe_bytes
                return ladder.rung(most) <= ladder.last and not self._is_too_large(least, safe_bytes)
            if subset not in small:
                return False
            taken = {**passed, **{assignment: proven.taken_bytes for assignment, proven in tried.items()}}
            shown = [
                taken_bytes
                for assignment, taken_bytes in taken.items()
                if all(self.costs.techniques(row, number) <= subset for row, number in enumerate(assignment))
            ]
            return min(shown) <= _SURELY * safe_bytes or len(shown) <= _ROUNDS

        return small if best is None else [each for each in self._subsets(among) if may_be_faster(each, best)]

    def _small_ones(self, subsets: Iterable[frozenset[str]], floor_bytes: int = 0) -> dict[Assignment, Proven]:
        """Small plans of each of these sets of techniques, the smallest among them."""
        smallest: dict[Assignment, Proven] = {}
        for subset in subsets:
            if (subset, floor_bytes) not in self._small:
                found = {self.costs.as_it_is: self.prove(self.costs.as_it_is)}
                shrink(self._chooser(), self.prove, found, subset, floor_bytes, patience=min(self.patience, _ROUNDS))
                if not reaches(found.values(), floor_bytes):
                    found |= {alike: self.prove(alike) for alike in self._moving_alike(subset)}
                self._small[subset, floor_bytes] = found
            smallest |= self._small[subset, floor_bytes]
        return smallest

    def _moving_alike(self, among: frozenset[str]) -> list[Assignment]:
        # Only the solver counts what the host has room for.
        if self._is_large or not self._reserves or self._link is None or self._link.cap_bytes is not None:
            return []
        return moving_alike(self.costs, among)

    def prove(self, assignment: Assignment) -> Proven:
        """The step under an assignment, simulated."""
        if assignment not in self._proofs:
            step = self._whole(assignment)
            found = step.attribution(self.costs.paths)
            held = dict(zip(found.stations, (found.held_bytes.sum(axis=0) - found.slack_bytes).tolist(), strict=True))
            taken = found.seconds[:, :2].sum(axis=1)
            self._proofs[assignment] = Proven(
                self.costs,
                self.menu,
                self.always,
                assignment,
                Plan(self._with(self.costs.rules(assignment))),
                step.profile(),
                shown_bytes(self.costs, assignment, held),
                np.r_[taken[:-1], np.zeros(len(self.costs.groups)), taken[-1:]],
            )
        return self._proofs[assignment]

    def _whole(self, assignment: Assignment) -> SimulatedStep:
        if assignment == self.costs.as_it_is:
            return self.plain
        return self._simulate(self._with(self.costs.rules(assignment)), True, _WHOLE)

    def _with(self, rules: Rules) -> Rules:
        # A later rule composes outside an earlier one.
        return (*rules, *self.always)
