"""The search for the fastest plan of a step within a budget.

NOTE
1. Each part of the model has candidates, and simulated trials give the bytes and the seconds of each (`Costs`).
2. The solver chooses the fastest candidates whose bytes add up to a limit (`Chooser.fastest`). The limits are those of
   one grid, which is the same for every budget (`ChoiceGrid`).
3. The whole step of a choice is simulated. Its bytes differ from their sum by a few percent, and the limit moves by as
   much, a few times for each set of techniques (`Effort`). A choice is not simulated if a step near to it shows that it
   takes too much. The fastest simulated step within the budget is the answer.

A choice depends on the limit alone, and a limit is taken at the grid's coarsest point in the range that may be right.
So searches for two budgets mostly simulate the same steps until a step fits the larger budget alone; from there the
larger budget looks among faster choices only, and the smaller one among slower choices. That keeps more budget from
being slower where whole segments are reserved, and the bytes of a step go up and down from limit to limit. It is no
proof: the range depends on the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from torch import nn

from memscale.algebra import Plan
from memscale.planning.parts.candidates import Candidate, Menu, Rules
from memscale.planning.parts.groups import groups_of
from memscale.planning.parts.parts import Part, parts_of
from memscale.planning.search.choice_grid import STEP, ChoiceGrid
from memscale.planning.search.descent import Descent, DescentStep, is_inside
from memscale.planning.search.effort import ROUNDS, Effort
from memscale.planning.search.found import Found, Proven
from memscale.planning.solving.program import GAP
from memscale.planning.solving.solver import Chooser, LinkRates
from memscale.planning.stepping import held_by_phase
from memscale.planning.trials.costs import Assignment, Costs, costs_of_step, measured_costs
from memscale.planning.trials.group_costs import shown_bytes, with_groups
from memscale.planning.trials.trial_rows import MOVES
from memscale.planning.trials.trials import Trials
from memscale.simulation import Trace, analyse, attribute

# Share of the budget that a plan leaves free for errors of the simulation: benchmarks/bench_predict.py (at most 0.09 %
# on models outside the tests).
_MARGIN = 1e-3
# A step in tiles with more than so many times the operators of the step as written counts for several:
# benchmarks/bench_long_context.py.
_LONG = 2
# How far below the wanted limit a limit of the grid may be, by whether an allocator reserves segments; reserved bytes
# go up and down from limit to limit: benchmarks/bench_plan.py, share of the budget.
_RANGE = {False: 0.0, True: 0.02}
# For a step of few operators, every `_COARSE`-th limit of the grid is tried if its choice may fit and be faster: a step
# of a smaller limit may take more bytes, so that a search by bytes alone passes over faster steps that fit:
# benchmarks/bench_plan.py.
_COARSE = 64
# A step that uses the share `_USED` of the budget is the answer, unless the rest may save the share `_WORTH` of time.
# Of a step with many operators, any that fits is the answer on that condition: benchmarks/bench_plan.py, share of the
# budget; benchmarks/bench_simulate.py --plan, simulations.
_USED, _WORTH = 0.99, 0.01
# Share by which a choice of another set of techniques must be estimated to be faster to be simulated:
# benchmarks/bench_simulate.py --plan counts simulations. Of the same set it is the solver's `GAP`.
_OTHERS = 5e-3
# Multiple of the budget, or of the smallest step: a choice with a larger estimate is not simulated, by whether the
# choice moves bytes, whose costs add up less exactly: benchmarks/bench_simulate.py --plan counts simulations.
_HARDLY = {False: 1.05, True: 1.25}
# A simulated step is near to a choice if it differs in at most the share `_NEAR` of the parts that the choice changes.
# The multiple of the budget from which on a choice that is expected to take more is not simulated:
# benchmarks/bench_simulate.py --plan counts simulations.
_NEAR, _SURELY = 0.5, 1.01
# A step that takes at most this multiple of the lower bound is the smallest: benchmarks/bench_plan.py --smallest.
_LEAST = 1.005

#: Returns the trace of a step with rules, with or without its update, of the model without the parts at some paths.
Simulate = Callable[[Rules, bool, frozenset[str]], Trace]
_WHOLE: frozenset[str] = frozenset()


def leaves_margin(taken_bytes: int, budget_bytes: int) -> bool:
    """Returns whether a simulated step of `taken_bytes` leaves the margin for the simulation's error free."""
    return taken_bytes <= int(budget_bytes * (1 - _MARGIN))


class Search:
    """A search among the candidates of a menu, in a step that has the rules `always`.

    The answer for a budget depends on the arguments and the budget, not on earlier calls.

    Args:
        model: the model to plan.
        simulate: returns the trace of the step with rules.
        menu: the menu of candidates.
        always: the rules that every step has; candidates compose inside these rules.
        link: the link between the device and the tier below; None if no candidate may move bytes.
        plain: the trace of the step with `always`; None simulates the step.
        trials: the trials of another search of this step, without an optimizer strategy.
        parts: the parts of that search; None finds them.
        loop_share: see `memscale.planning.stepping.loop_share`.

    Attributes:
        menu, always: the arguments.
        notes: what the search left out of a long step; empty for others.
    """

    def __init__(
        self,
        model: nn.Module,
        simulate: Simulate,
        menu: Menu,
        *,
        always: Rules = (),
        link: LinkRates | None = None,
        plain: Trace | None = None,
        trials: Trials | None = None,
        parts: tuple[Part, ...] | None = None,
        loop_share: float = 1.0,
    ) -> None:
        self.menu, self.always = menu, always
        self._model = model
        self._trials = {} if trials is None else dict(trials)
        self._given_parts = parts
        self.plain = plain if plain is not None else simulate(always, True, _WHOLE)
        self._simulate = simulate
        operators = len(self.plain.last_operators)
        self._effort = Effort.of(operators)
        self.notes: tuple[str, ...] = ()
        if self._effort.is_long:
            self.notes = (
                f"a step of {operators} operators takes long to simulate: few choices were tried, and another may be "
                "better",
            )
        self._link, self._loop_share = link, loop_share
        self._proofs: dict[Assignment, Proven] = {}
        self._trial_steps = 0
        self._by_rules: dict[Rules, Proven] = {}
        self._descents: dict[Assignment, tuple[list[DescentStep], int]] = {}
        self._small: dict[tuple[frozenset[str], int], dict[Assignment, Proven]] = {}

    # -- parts, costs and inner searches -------------------------------------------------------------------------------

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Returns the parts to decide about."""
        return self._given_parts or parts_of(self._model, self.plain, tiles=self.menu.tiles)

    @functools.cached_property
    def costs(self) -> Costs:
        """Returns the costs of all candidates, from simulated steps."""
        menus: list[tuple[Candidate, ...]] = []
        by_family: dict[object, tuple[Candidate, ...]] = {}
        for part in self.parts:
            if part.alike not in by_family:
                by_family[part.alike] = self.menu.for_part(part, self.plain)
            menus.append(by_family[part.alike])
        menus.append(self.menu.for_outside(self._model, self.parts, self.plain))

        def simulate(rules: Rules, omitted: frozenset[str]) -> Trace:
            self._trial_steps += 1
            return self._simulate(self._with(rules), False, omitted)

        def menu_of(group: Part) -> tuple[Candidate, ...]:
            inside = [self.parts[row].path for row in group.members if row < len(self.parts)]
            return self.menu.for_group(group, inside, self.plain)

        # A stopped search leaves no trials: resumed among fewer candidates, the trials would be in other steps and show
        # other costs.
        most, trials, self._trial_steps = self._effort.trials, dict(self._trials), 0
        found = measured_costs(self.plain, self.parts, menus, simulate, trials, most=most, loop_share=self._loop_share)
        groups = [each for each in self._groups if len(menu_of(each)) > 1] if not self._effort.is_long else []
        if groups:
            found = with_groups(found, self.plain, groups, menu_of, simulate, trials, most=most)
        self._trials = trials
        return found

    @functools.cached_property
    def _groups(self) -> tuple[Part, ...]:
        return groups_of(self._model, self.plain, self.parts)

    @property
    def trials(self) -> Trials:
        """Returns the trials of all candidates."""
        assert self.costs, "costs are found by trials"
        return self._trials

    @property
    def shown(self) -> list[Proven]:
        """Returns all plans whose steps were simulated."""
        return [*self._proofs.values(), *self._by_rules.values()]

    def among(self, techniques: frozenset[str]) -> Search:
        """Returns the search of the same step among other techniques, with the same trials if the parts are the same.

        The parts may differ with and without `tile`: a module around a tiled loss head is not a part.
        """
        menu = dataclasses.replace(self.menu, techniques=techniques)
        same = menu.tiles == self.menu.tiles or self.parts == parts_of(self._model, self.plain, tiles=menu.tiles)
        return Search(
            self._model,
            self._simulate,
            menu,
            always=self.always,
            link=self._link,
            plain=self.plain,
            trials=self.trials if same else None,
            loop_share=self._loop_share,
        )

    @functools.cached_property
    def _grid(self) -> ChoiceGrid:
        return ChoiceGrid(self.costs, self._link, self.prove(self.costs.as_it_is), self._effort)

    @property
    def _chooser(self) -> Chooser:
        return self._grid.chooser

    # -- answers -------------------------------------------------------------------------------------------------------

    def fastest(self, budget_bytes: int, below_seconds: float = np.inf) -> Found | None:
        """Returns the fastest plan found whose step takes at most `budget_bytes`; None if none was found.

        Args:
            budget_bytes: bytes that the step may take.
            below_seconds: the seconds of a plan that is known; only faster plans are searched.
        """
        safe_bytes = int(budget_bytes * (1 - _MARGIN))
        tried = {self.costs.as_it_is: self.prove(self.costs.as_it_is)}
        bounds = []

        def may_be_faster(assignment: Assignment) -> bool:
            if self._count(tried) > self._effort.before_corrections or not self._may_fit(assignment, safe_bytes):
                return False
            best = _best(tried.values(), safe_bytes)
            below = below_seconds if best is None else min(below_seconds, best.seconds)
            return self._chooser.seconds(assignment) < (1 - GAP) * below

        for among in self._grid.sets:
            # A long step has no simulations to spare for a set whose smallest choice hardly fits.
            if self._effort.is_short or self._may_fit(self._grid.least(among).assignment, safe_bytes):
                bounds += self._descend(among, safe_bytes, tried, below_seconds)
        for among in self._grid.sets if self._effort.is_short else ():
            for at in range(_COARSE, self._grid.last(among) + 1, _COARSE):
                if may_be_faster(coarse := self._grid.fastest(at, among).assignment):
                    tried[coarse] = self.prove(coarse)
        for among in self._grid.sets:
            if may_be_faster(self._grid.least(among).assignment):
                tried |= self._small_ones(among)
        for alike in self._grid.alike:
            if may_be_faster(alike) and not self._excess(alike, tried, safe_bytes):
                tried[alike] = self.prove(alike)
        self._correct(safe_bytes, tried, below_seconds)
        # If no plan leaves the margin free, a plan that fits without the margin is the answer.
        best = _best(tried.values(), safe_bytes) or _best(tried.values(), budget_bytes)
        if best is None:
            return None
        # A simulated step that is faster than the bound of the costs refutes the bound.
        return Found(best, min([best.seconds, *bounds]), self._trial_steps + len(tried))

    def smallest(self, floor_bytes: int = 0, enough_bytes: int = 0) -> Found:
        """Returns the plan with the smallest peak.

        Args:
            floor_bytes: a lower bound of the allocated bytes of all plans: the search ends at a plan that reaches the
                bound, even if another plan may reserve a few percent less.
            enough_bytes: of the plans that take at most so many bytes, the fastest is returned.
        """
        tried: dict[Assignment, Proven] = {}
        for alike in self._grid.alike if self._effort.is_long else ():
            if not self.suffices(tried.values(), floor_bytes, enough_bytes):
                tried[alike] = self.prove(alike)
        # Plans without moves are faster at the floor; otherwise plans with moves are smaller, and may suffice.
        for among in self._grid.sets if floor_bytes else reversed(self._grid.sets):
            if not self.suffices(tried.values(), floor_bytes, enough_bytes):
                tried |= self._small_ones(among, floor_bytes)
        for alike in self._grid.alike if not self._effort.is_long else ():
            least_bytes = min(each.taken_bytes for each in tried.values())
            hardly = self._chooser.held_bytes(alike) > _HARDLY[True] * least_bytes
            if not hardly and not self.suffices(tried.values(), floor_bytes, enough_bytes):
                tried[alike] = self.prove(alike)
        found, count = [*tried.values()], self._trial_steps + len(tried)
        if not self.suffices(found, floor_bytes, enough_bytes) and not self._effort.is_long:
            smaller, more = self._descended(min(found, key=lambda each: each.taken_bytes), enough_bytes)
            found, count = [*found, *smaller], count + more
        best = min(found, key=lambda each: (max(each.taken_bytes, enough_bytes), each.seconds))
        return Found(best, best.seconds, count)

    def suffices(self, found: Iterable[Proven], floor_bytes: int, enough_bytes: int) -> bool:
        """Returns whether no smaller plan is searched: one reaches the floor, or takes little enough in a long step."""
        enough = (each for each in found if each.taken_bytes <= enough_bytes)
        return any(self._effort.is_long or self._steps(each) > 1 for each in enough) or _reaches(found, floor_bytes)

    def _descent(self, start: Proven, floor_bytes: int) -> tuple[list[DescentStep], int]:
        """Returns the steps of the descent from `start`, and the number of simulations."""
        if start.assignment not in self._descents:

            def simulate(rules: Rules, omitted: frozenset[str]) -> Trace:
                return self._simulate(self._with(self._cast(rules)), False, omitted)

            descent = Descent(self._model, self.plain, self.menu, simulate)
            steps = descent.run(self.costs.rules(start.assignment), floor_bytes)
            self._descents[start.assignment] = steps, descent.simulations
        return self._descents[start.assignment]

    def _descended(self, start: Proven, enough_bytes: int) -> tuple[list[Proven], int]:
        """Returns steps of the descent from `start`, the fastest with `enough_bytes` or the smallest, and a count.

        The count is that of the simulations.
        """
        profile = analyse(self.plain)
        states_bytes = int(attribute(self.plain, [""]).states_bytes.sum())
        # The update holds as much under any plan that streams no parameters.
        updates_bytes = 0 if self.costs.streams(start.assignment) else held_by_phase(profile).get("optimizer", 0)
        steps, count = self._descent(start, max(0, updates_bytes - states_bytes))
        found: list[Proven] = []
        fitting = [each for each in steps if max(updates_bytes, each.taken_bytes + states_bytes) <= enough_bytes]
        for each in (*sorted(fitting, key=lambda each: each.seconds), *steps[-1:]):
            found.append(self._prove_rules(each.rules))
            if found[-1].taken_bytes <= enough_bytes:
                break
        return found, count + len(found)

    def _cast(self, rules: Rules) -> Rules:
        return self.menu.cast_within(Candidate(rules)).rules if self.menu.casts else rules

    def _prove_rules(self, rules: Rules) -> Proven:
        """Returns the plan of `rules` with its simulated step; its parts are the outermost modules with rules."""
        rules = self._cast(rules)
        if rules not in self._by_rules:
            paths = dict.fromkeys(path for path, _ in rules)
            tops = [path for path in paths if not any(is_inside(path, other) for other in paths)]
            parts = tuple(Part(path, self._model.get_submodule(path), (), path) for path in tops)
            chosen = [
                Candidate(
                    tuple(
                        (path.removeprefix(top).lstrip("."), how)
                        for path, how in rules
                        if path == top or is_inside(path, top)
                    )
                )
                for top in tops
            ]
            step = self._simulate(self._with(rules), True, _WHOLE)
            costs = costs_of_step(self.plain, parts, chosen, step)
            self._by_rules[rules] = self._proven(costs, (*[1] * len(parts), 0), step)
        return self._by_rules[rules]

    def least(self) -> Proven:
        """Returns the choice with the smallest estimated peak, by one simulation; `smallest` takes many."""
        found = (self._grid.least(among).assignment for among in self._grid.sets)
        return self.prove(min(found, key=self._chooser.held_bytes))

    def _moves(self, assignment: Assignment) -> bool:
        return any(self.costs.techniques(row, number) & MOVES for row, number in enumerate(assignment))

    def _may_fit(self, assignment: Assignment, safe_bytes: int) -> bool:
        """Returns whether a step may take at most `safe_bytes`, though its estimate is larger by a usual error."""
        return self._chooser.held_bytes(assignment) <= _HARDLY[self._moves(assignment)] * safe_bytes

    def _excess(self, assignment: Assignment, tried: Mapping[Assignment, Proven], safe_bytes: int) -> float:
        """Returns by what factor the step of a choice exceeds `safe_bytes`, as far as a simulated step shows; else 0.

        The estimates of two choices that differ in few parts are wrong by about as many bytes, such as those that the
        allocator reserves beside the same blocks. So the nearest simulated step tells what the choice takes. Of a step
        with few operators all choices are simulated: the result is 0.
        """
        if self._effort.is_short:
            return 0.0

        def apart(other: Assignment) -> int:
            return sum(map(operator.ne, other, assignment))

        near = min(tried, key=apart)
        if near != assignment and (near == self.costs.as_it_is or apart(near) > _NEAR * apart(self.costs.as_it_is)):
            return 0.0
        held_bytes = self._chooser.held_bytes
        excess = (held_bytes(assignment) + tried[near].taken_bytes - held_bytes(near)) / safe_bytes
        return excess if excess > (1 if near == assignment else _SURELY) else 0.0

    def prove(self, assignment: Assignment) -> Proven:
        """Returns an assignment with its simulated step."""
        if assignment not in self._proofs:
            self._proofs[assignment] = self._proven(self.costs, assignment, self._whole(assignment))
        return self._proofs[assignment]

    def _count(self, tried: Mapping[Assignment, Proven]) -> float:
        """Returns how many simulated steps these steps count for."""
        return sum(map(self._steps, tried.values()))

    def _steps(self, proven: Proven) -> float:
        """Returns how many simulated steps this step counts for: more than one if it is long."""
        return max(1.0, proven.operators / (_LONG * max(1, len(self.plain.last_operators))))

    def _proven(self, costs: Costs, assignment: Assignment, step: Trace) -> Proven:
        found = attribute(step, costs.paths)
        held = dict(zip(found.intervals, (found.held_bytes.sum(axis=0) - found.slack_bytes).tolist(), strict=True))
        taken = found.seconds[:, :2].sum(axis=1)
        return Proven(
            costs,
            self.menu,
            self.always,
            assignment,
            Plan(self._with(costs.rules(assignment))),
            analyse(step),
            len(step.last_operators),
            shown_bytes(costs, assignment, held),
            np.r_[taken[:-1], np.zeros(len(costs.groups)), taken[-1:]],
        )

    # -- how answers are found -----------------------------------------------------------------------------------------

    def _descend(
        self, among: frozenset[str], safe_bytes: int, tried: dict[Assignment, Proven], below: float
    ) -> list[float]:
        """Simulates choices among these techniques for a budget, and adds the simulated steps to `tried`.

        Args:
            among: the techniques.
            safe_bytes: bytes that a step may take.
            tried: the simulated steps for this budget.
            below: the seconds of a known step; only choices with a smaller estimate are simulated.

        Returns:
            A list with the lower bound, in seconds, of all choices that fit; empty if no choice was found to fit.
        """
        chooser, grid, bound = self._chooser, self._grid, list[float]()
        rounds, most, late = ROUNDS, self._effort.before_corrections, math.inf
        over, fits = -1, grid.last(among) + 1
        # The first aim: the estimate of the step nearest to the budget is assumed to be wrong by the same factor.
        near = min(tried.values(), key=lambda each: abs(each.taken_bytes - safe_bytes))
        aim, width = safe_bytes * chooser.held_bytes(near.assignment) / near.taken_bytes, _RANGE[self._reserves]

        def prove(assignment: Assignment) -> Proven:
            nonlocal below, late
            found = tried[assignment] = self.prove(assignment)
            late = min(late, found.seconds - chooser.seconds(assignment))
            if found.taken_bytes <= safe_bytes:
                below = min(below, (1 - GAP) * found.seconds)
            return found

        def is_faster(assignment: Assignment) -> bool:
            return chooser.seconds(assignment) + (0.0 if late == math.inf else late) < below

        if (best := _best(tried.values(), safe_bytes)) is not None:
            below = min(below, (1 - _OTHERS) * best.seconds)
        while over + 1 < fits:
            at = _coarsest(max(over, grid.number(aim) - 1), min(fits, grid.number(aim * (1 - width)) + 1))
            if at is None and grid.number(aim) >= fits:
                if fits > grid.last(among):
                    at = fits - 1
                elif over < 0 or not self._reserves:
                    break  # the choices that are left have larger estimates
            at = _coarsest(over, fits) if at is None else at
            assert at is not None, "there are limits between"
            choice = grid.fastest(at, among)
            if not is_faster(choice.assignment):
                fits = at  # only limits above may have a faster choice
                continue
            if excess := self._excess(choice.assignment, tried, safe_bytes):
                held = chooser.held_bytes(choice.assignment)
                over, aim = max(at, grid.number(held) - 1), held / excess
                continue
            if rounds == 0 or self._count(tried) > most:
                break
            rounds -= 1
            found, held = prove(choice.assignment), chooser.held_bytes(choice.assignment)
            aim = safe_bytes * held / found.taken_bytes
            if found.taken_bytes <= safe_bytes:
                fits, bound = at, [choice.bound]
                aim *= 1 + width  # the next choice may be smaller than its estimate by `width`
                rest = grid.fastest(max(over + 1, grid.number(aim)), among).assignment
                worth = 1 - chooser.seconds(rest) / chooser.seconds(choice.assignment)
                enough = found.taken_bytes >= _USED * safe_bytes or not self._effort.is_short
                if worth < (_WORTH if enough else GAP):
                    break
                continue
            over = max(at, grid.number(held) - 1)  # limits down to `held` have the same choice
            form = chooser.uniform(choice.assignment, among)
            smaller = chooser.held_bytes(form) < held
            if self._effort.is_long:  # no simulation to spare for the form while a corrected choice is expected to fit
                smaller = smaller and aim < chooser.held_bytes(form)
            if self._count(tried) <= most and form not in tried and smaller and is_faster(form):
                prove(form)
                bound = bound or [choice.bound] * (tried[form].taken_bytes <= safe_bytes)
        return bound

    def _correct(self, safe_bytes: int, tried: dict[Assignment, Proven], below: float) -> None:
        """Simulates choices by the costs that the fastest fitting step corrects, if they are faster.

        The choices are in turn without moves, whose estimates are more exact, and among all techniques.
        """
        for number in range(self._effort.corrections):
            if self._count(tried) > self._effort.steps or (best := _best(tried.values(), safe_bytes)) is None:
                return
            among = self._grid.sets[number % min(2, len(self._grid.sets))]
            chooser = Chooser(self.costs, self._link)
            best.correct(chooser)
            choice = chooser.fastest(safe_bytes, among)
            # Below a choice that does not fit, another may: a larger budget tries what a smaller one finds.
            while choice is not None:
                known, excess = tried.get(choice.assignment), self._excess(choice.assignment, tried, safe_bytes)
                if not excess and (known is None or known.taken_bytes <= safe_bytes):
                    break
                share = min(1 - STEP, 1 / (excess or 1.0))
                choice = chooser.fastest(share * chooser.held_bytes(choice.assignment), among)
            if choice is None or choice.assignment in tried:
                continue
            if chooser.seconds(choice.assignment) < (1 - _OTHERS) * min(below, best.seconds):
                tried[choice.assignment] = self.prove(choice.assignment)

    @property
    def _reserves(self) -> bool:
        """Returns whether the device's allocator reserves memory in segments."""
        return self.prove(self.costs.as_it_is).profile.reserved_peak_bytes is not None

    def _small_ones(self, among: frozenset[str], floor_bytes: int = 0) -> dict[Assignment, Proven]:
        """Returns small plans of these techniques: chosen and simulated until a step is near its lower bound."""
        if (among, floor_bytes) not in self._small:
            chooser, tried = self._grid.new_chooser(), {self.costs.as_it_is: self.prove(self.costs.as_it_is)}
            for _ in range(self._effort.rounds):
                if _reaches(tried.values(), floor_bytes):
                    break
                choice = chooser.smallest(among)
                if choice.assignment in tried:
                    break
                found = tried[choice.assignment] = self.prove(choice.assignment)
                found.correct(chooser)
                if found.taken_bytes <= _LEAST * choice.bound:
                    break
            # Many choices may hold as few bytes: look for a faster one.
            for _ in range(self._effort.looks):
                least = min(tried.values(), key=lambda each: each.taken_bytes)
                faster = chooser.fastest(least.taken_bytes, among)
                if faster is None or faster.assignment in tried:
                    break
                found = tried[faster.assignment] = self.prove(faster.assignment)
                found.correct(chooser)
            self._small[among, floor_bytes] = tried
        return self._small[among, floor_bytes]

    def _whole(self, assignment: Assignment) -> Trace:
        if assignment == self.costs.as_it_is:
            return self.plain
        return self._simulate(self._with(self.costs.rules(assignment)), True, _WHOLE)

    def _with(self, rules: Rules) -> Rules:
        # A later rule composes outside an earlier rule: `always` is outermost.
        return (*rules, *self.always)


def _best(found: Iterable[Proven], most_bytes: int) -> Proven | None:
    fitting = [each for each in found if each.taken_bytes <= most_bytes]
    return min(fitting, key=lambda each: each.preference, default=None)


def _reaches(found: Iterable[Proven], floor_bytes: int) -> bool:
    """Returns whether one of the steps holds about `floor_bytes`, the lower bound of all steps."""
    return any(
        max(each.profile.first_step_peak_bytes, each.profile.peak_bytes) <= _LEAST * floor_bytes for each in found
    )


def _coarsest(low: int, high: int) -> int | None:
    """Returns the number between `low` and `high`, both exclusive, with the most factors of two; None if none exists.

    >>> _coarsest(64, 100), _coarsest(70, 100), _coarsest(96, 98), _coarsest(96, 97)
    (96, 96, 97, None)
    """
    found, step = None, 1
    while (number := (low // step + 1) * step) < high and found != 0:
        found, step = number, 2 * step
    return found
