"""The search for the fastest plan of a step within a budget.

NOTE
1. Each part of the model has candidates, and simulated trials give the bytes and the seconds of each (`Costs`).
2. The solver chooses the fastest candidates whose bytes add up to a limit (`Chooser.fastest`). The limits are those of
   one grid, `_STEP` apart, which is the same for every budget.
3. The whole step of a choice is simulated. Its bytes differ from their sum by a few percent, and the limit moves by as
   much, at most `_ROUNDS` times for each set of techniques. The fastest simulated step within the budget is the answer.

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
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from torch import nn

from memscale.algebra import Plan
from memscale.core import template
from memscale.planning.parts.candidates import Candidate, Menu, Rules
from memscale.planning.parts.groups import groups_of
from memscale.planning.parts.parts import Part, parts_of
from memscale.planning.search.found import Found, Proven, fastest_of, smallest_of
from memscale.planning.solving.solver import Choice, Chooser, LinkRates
from memscale.planning.trials.costs import GROUPED, Assignment, Costs, measured_costs
from memscale.planning.trials.groups import shown_bytes, with_groups
from memscale.planning.trials.trial_rows import MOVES
from memscale.planning.trials.trials import Trials
from memscale.simulation import Trace, analyse, attribute

# Of the budget, for what a simulation may be off: 0.09 % at worst on models that it was never shown.
_MARGIN = 1e-3
# Simulated steps for one budget and one set of techniques.
_ROUNDS, _CORRECTIONS = 5, 2
# Between a limit of the grid and the next; and how far below the limit that is aimed at a point of the grid may be, by
# whether an allocator reserves segments, whose bytes go up and down from limit to limit.
_STEP, _RANGE = 2e-3, {False: 0.0, True: 0.02}
# A step that uses this share of the budget is the answer, unless the rest is worth the other share of its time.
_USED, _WORTH = 0.99, 0.01
# A choice that is faster by less than this share is not simulated: the solver is as far from the best. Nor among other
# techniques what is faster by less than the other share.
_FASTER, _OTHERS = 1e-3, 5e-3
# Of the budget, or of the smallest step: what is thought to hold more does take more, by whether something moves, or
# the costs may not add up at all, as where a forward runs a backward.
_HARDLY = {False: 1.05, True: 1.25}
# A smallest step that takes no more than this share of what was expected is the smallest; so often a faster choice that
# takes as little is looked for.
_LEAST, _LOOKS = 1.005, 3
# Of the step as it is, what the allocator is thought to keep beside what is allocated, at most.
_KEPT = 0.1
# A step of very many operators (a model that loops over time in Python) takes minutes to simulate: of such few choices
# are tried, counted in operators, since a limit in seconds would make the plan depend on the machine.
_MOST_OPERATORS, _FEWEST = 500_000, 2

#: Simulates the step with these rules, with its update or without; of the model without the parts at these paths.
Simulate = Callable[[Rules, bool, frozenset[str]], Trace]
_WHOLE: frozenset[str] = frozenset()


def leaves_margin(taken_bytes: int, budget_bytes: int) -> bool:
    """Whether a step that takes so much by its simulation fits the budget on a device, too."""
    return taken_bytes <= int(budget_bytes * (1 - _MARGIN))


class Search:
    """The search among the candidates on a menu, on top of rules that every step has.

    Its answers depend on its arguments and the budget, not on what it was asked before.

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
        plain: Trace | None = None,
        trials: Trials | None = None,
        loop_share: float = 1.0,
    ) -> None:
        self.menu, self.always = menu, always
        self._model = model
        self._trials = {} if trials is None else dict(trials)
        self.plain = plain if plain is not None else simulate(always, True, _WHOLE)
        self._simulate = simulate
        operators = len(self.plain.last_operators)
        self.patience = max(_FEWEST, _MOST_OPERATORS // max(1, operators))
        self.notes: tuple[str, ...] = ()
        if self.patience < _ROUNDS:
            self.notes = (
                f"a step of {operators} operators takes long to simulate, so that {self.patience} choices were tried; "
                "one that was not may be better",
            )
        self._link, self._loop_share = link, loop_share
        self._proofs: dict[Assignment, Proven] = {}
        self._choices: dict[tuple[frozenset[str], int], Choice | None] = {}
        self._trial_steps = 0
        self._small: dict[tuple[frozenset[str], int], dict[Assignment, Proven]] = {}

    # -- what is chosen among ------------------------------------------------------------------------------------------

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
        menus.append(self.menu.for_outside(self._model, self.parts, self.plain))

        def simulate(rules: Rules, away: frozenset[str]) -> Trace:
            self._trial_steps += 1
            return self._simulate(self._with(rules), False, away)

        def menu_of(group: Part) -> tuple[Candidate, ...]:
            inside = [self.parts[row].path for row in group.members if row < len(self.parts)]
            return self.menu.for_group(group, inside, self.plain)

        # Trials of a search that was stopped on the way are made again: with others beside them they show other costs.
        most, trials, self._trial_steps = self.patience, dict(self._trials), 0
        found = measured_costs(self.plain, self.parts, menus, simulate, trials, most=most, loop_share=self._loop_share)
        if most >= _ROUNDS:
            groups = groups_of(self._model, self.plain, self.parts)
            found = with_groups(found, self.plain, groups, menu_of, simulate, trials, most=most)
        self._trials = trials
        return found

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

    @functools.cached_property
    def uncut(self) -> Search | None:
        """The search among what does not cut rows, if that takes the model apart in another way: where a loss head may
        be cut, what is around it is no part.
        """
        own, others = ([part.path for part in each] for each in (self.parts, parts_of(self._model, self.plain)))
        if not self.menu.tiles or self.patience < _ROUNDS or own == others:
            return None
        return self._other(dataclasses.replace(self.menu, techniques=self.menu.techniques - {"tile"}), None)

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

    @functools.cached_property
    def _sets(self) -> list[frozenset[str]]:
        """The sets of techniques to choose among, one after the other: those that move nothing, all, and all without
        groups. What many do together is not always what their costs add up to, and moves add up least.
        """
        there = frozenset(each for menu in self.costs.candidates for candidate in menu for each in candidate.techniques)
        grouped = GROUPED if self.costs.groups else frozenset()
        sets = dict.fromkeys([(there | grouped) - MOVES, there | grouped, there])
        return list(sets)[: 2 if self.patience < _ROUNDS else None]

    # -- answers -------------------------------------------------------------------------------------------------------

    def fastest(self, budget_bytes: int, below_seconds: float = np.inf) -> Found | None:
        """The fastest plan whose step takes at most `budget_bytes`, None if none was found; if there is another one
        that takes `below_seconds`, none that is not faster is looked for.
        """
        safe_bytes = int(budget_bytes * (1 - _MARGIN))
        tried = {self.costs.as_it_is: self.prove(self.costs.as_it_is)}
        bounds = []

        def may_be_faster(assignment: Assignment) -> bool:
            moves = any(self.costs.techniques(row, number) & MOVES for row, number in enumerate(assignment))
            if self._chooser.held_bytes(assignment) > _HARDLY[moves] * safe_bytes:
                return False
            best = _best(tried.values(), safe_bytes)
            below = below_seconds if best is None else min(below_seconds, best.seconds)
            return self._chooser.seconds(assignment) < (1 - _FASTER) * below

        for among in self._sets:
            bounds += self._descend(among, safe_bytes, tried, below_seconds)
        for among in self._sets:
            if may_be_faster(self._least(among).assignment):
                tried |= self._small_ones(among)
        for alike in self._alike:
            if may_be_faster(alike):
                tried[alike] = self.prove(alike)
        self._correct(safe_bytes, tried, below_seconds)
        found: list[Found] = []
        # Where nothing leaves the margin, what fits without it is better than nothing.
        for most in (safe_bytes, budget_bytes):
            if not found and (best := _best(tried.values(), most)):
                # A step that is faster than its costs add up to shows what they are worth as a bound.
                found.append(Found(best, min([best.seconds, *bounds]), self._trial_steps + len(tried)))
        if not found and below_seconds == np.inf and self.finer is not None:
            found += filter(None, [self.finer.fastest(budget_bytes)])
        if self.uncut is not None:
            below = min([below_seconds, *(each.proven.seconds for each in found)])
            found += filter(None, [self.uncut.fastest(budget_bytes, below)])
        return fastest_of(found)

    def smallest(self, floor_bytes: int = 0, enough_bytes: int = 0) -> Found:
        """The plan with the least peak; one that holds `floor_bytes`, which all do, is it. Of those that take no more
        than `enough_bytes` the fastest.

        What an allocator keeps beside that differs by a few percent from plan to plan, and is not what is looked for
        where the floor is told.
        """
        tried: dict[Assignment, Proven] = {}
        for among in self._sets:
            tried |= {} if _reaches(tried.values(), floor_bytes) else self._small_ones(among, floor_bytes)
        for alike in self._alike:
            least_bytes = min(each.taken_bytes for each in tried.values())
            hardly = self._chooser.held_bytes(alike) > _HARDLY[True] * least_bytes
            if not hardly and not _reaches(tried.values(), floor_bytes):
                tried[alike] = self.prove(alike)
        best = min(tried.values(), key=lambda each: (max(each.taken_bytes, enough_bytes), each.seconds))
        found = [Found(best, best.seconds, self._trial_steps + len(tried))]
        for other in ("finer", "uncut"):
            if (
                min(each.proven.taken_bytes for each in found) > enough_bytes
                and not _reaches([each.proven for each in found], floor_bytes)
                and (search := getattr(self, other))
            ):
                found.append(search.smallest(floor_bytes, enough_bytes))
        return smallest_of(found, enough_bytes)

    def least(self) -> Proven:
        """The choice that is thought to take the least, without those that move more than it must: one simulation,
        where `smallest` takes many.
        """
        return self.prove(self._least(self._sets[0]).assignment)

    def prove(self, assignment: Assignment) -> Proven:
        """The step under an assignment, simulated."""
        if assignment not in self._proofs:
            step = self._whole(assignment)
            found = attribute(step, self.costs.paths)
            held = dict(zip(found.intervals, (found.held_bytes.sum(axis=0) - found.slack_bytes).tolist(), strict=True))
            taken = found.seconds[:, :2].sum(axis=1)
            self._proofs[assignment] = Proven(
                self.costs,
                self.menu,
                self.always,
                assignment,
                Plan(self._with(self.costs.rules(assignment))),
                analyse(step),
                shown_bytes(self.costs, assignment, held),
                np.r_[taken[:-1], np.zeros(len(self.costs.groups)), taken[-1:]],
            )
        return self._proofs[assignment]

    # -- how they are found --------------------------------------------------------------------------------------------

    def _descend(
        self, among: frozenset[str], safe_bytes: int, tried: dict[Assignment, Proven], below: float
    ) -> list[float]:
        """Simulate choices among these techniques for a budget, and add them to `tried`.

        Args:
            among: the techniques.
            safe_bytes: what a step may take.
            tried: the steps for this budget.
            below: the time of a step that is known besides; what is not thought to be faster is not simulated.

        Returns:
            The time that no choice is below, as far as is thought; nothing if none was found to fit.
        """
        chooser, bound = self._chooser, list[float]()
        rounds, late = min(self.patience, _ROUNDS), math.inf
        over, fits = -1, self._last(among) + 1
        # What the step nearest to the budget holds beside what was thought, the first choice may, too.
        near = min(tried.values(), key=lambda each: abs(each.taken_bytes - safe_bytes))
        aim, width = safe_bytes * chooser.held_bytes(near.assignment) / near.taken_bytes, _RANGE[self._reserves]

        def prove(assignment: Assignment) -> Proven:
            nonlocal below, late
            found = tried[assignment] = self.prove(assignment)
            late = min(late, found.seconds - chooser.seconds(assignment))
            if found.taken_bytes <= safe_bytes:
                below = min(below, (1 - _FASTER) * found.seconds)
            return found

        def is_faster(assignment: Assignment) -> bool:
            return chooser.seconds(assignment) + (0.0 if late == math.inf else late) < below

        if (best := _best(tried.values(), safe_bytes)) is not None:
            below = min(below, (1 - _OTHERS) * best.seconds)
        while over + 1 < fits:
            at = _coarsest(max(over, self._at(aim) - 1), min(fits, self._at(aim * (1 - width)) + 1))
            if at is None and self._at(aim) >= fits:
                if fits > self._last(among):
                    at = fits - 1
                elif over < 0 or not self._reserves:
                    break  # what is left is thought to take more
            at = _coarsest(over, fits) if at is None else at
            assert at is not None, "there are limits between"
            choice = self._choice(at, among)
            if not is_faster(choice.assignment):
                fits = at  # only limits above may have a faster choice
                continue
            if rounds == 0:
                break
            rounds -= 1
            found, held = prove(choice.assignment), chooser.held_bytes(choice.assignment)
            aim = safe_bytes * held / found.taken_bytes
            if found.taken_bytes <= safe_bytes:
                fits, bound = at, [choice.bound]
                aim *= 1 + width  # the next choice may come out smaller than thought by as much
                rest = self._choice(max(over + 1, self._at(aim)), among).assignment
                worth = 1 - chooser.seconds(rest) / chooser.seconds(choice.assignment)
                if worth < (_WORTH if found.taken_bytes >= _USED * safe_bytes else _FASTER):
                    break
                continue
            over = max(at, self._at(held) - 1)  # down to there the choice is the same
            form = chooser.uniform(choice.assignment, among)
            if form not in tried and chooser.held_bytes(form) < held and is_faster(form):
                prove(form)
                bound = bound or [choice.bound] * (tried[form].taken_bytes <= safe_bytes)
        return bound

    def _correct(self, safe_bytes: int, tried: dict[Assignment, Proven], below: float) -> None:
        """Simulate choices by the costs as the fastest step that fits corrects them, as long as they are faster."""
        for _ in range(min(self.patience, _CORRECTIONS)):
            if (best := _best(tried.values(), safe_bytes)) is None:
                return
            chooser = Chooser(self.costs, self._link)
            best.correct(chooser)
            choice = chooser.fastest(safe_bytes, self._sets[1 % len(self._sets)])
            if choice is None or choice.assignment in tried:
                return
            if chooser.seconds(choice.assignment) >= (1 - _OTHERS) * min(below, best.seconds):
                return
            tried[choice.assignment] = self.prove(choice.assignment)

    @property
    def _reserves(self) -> bool:
        """Whether the device's allocator reserves memory in segments."""
        return self.prove(self.costs.as_it_is).profile.reserved_peak_bytes is not None

    @functools.cached_property
    def _chooser(self) -> Chooser:
        """One that knows of the step as it is."""
        return self._new_chooser()

    def _new_chooser(self) -> Chooser:
        chooser, as_it_is = Chooser(self.costs, self._link), self.prove(self.costs.as_it_is)
        # What an allocator keeps beside the largest tensors says little of steps that do without them.
        as_it_is.correct(chooser, int(_KEPT * as_it_is.taken_bytes))
        return chooser

    def _at(self, limit_bytes: float) -> int:
        """The number of the first limit of the grid of no more than these bytes."""
        most_bytes = self.prove(self.costs.as_it_is).taken_bytes
        return max(0, math.ceil(math.log(max(1, limit_bytes) / most_bytes) / math.log(1 - _STEP) - 1e-9))

    def _last(self, among: frozenset[str]) -> int:
        """The number of the last limit that has a choice."""
        return max(0, self._at(self._chooser.held_bytes(self._least(among).assignment)) - 1)

    def _least(self, among: frozenset[str]) -> Choice:
        if (among, -1) not in self._choices:
            self._choices[among, -1] = self._chooser.smallest(among)
        found = self._choices[among, -1]
        assert found is not None
        return found

    def _choice(self, at: int, among: frozenset[str]) -> Choice:
        """The fastest choice that is thought to hold no more than a limit."""
        if (among, at) not in self._choices:
            limit_bytes = self.prove(self.costs.as_it_is).taken_bytes * (1 + 1e-9) * (1 - _STEP) ** at
            self._choices[among, at] = self._chooser.fastest(limit_bytes, among)
        return self._choices[among, at] or self._least(among)  # the solver gave up

    def _small_ones(self, among: frozenset[str], floor_bytes: int = 0) -> dict[Assignment, Proven]:
        """Small plans of these techniques: choose what takes least and simulate, until a step is what was expected."""
        if (among, floor_bytes) not in self._small:
            chooser, tried = self._new_chooser(), {self.costs.as_it_is: self.prove(self.costs.as_it_is)}
            for _ in range(min(self.patience, _ROUNDS)):
                if _reaches(tried.values(), floor_bytes):
                    break
                choice = chooser.smallest(among)
                if choice.assignment in tried:
                    break
                found = tried[choice.assignment] = self.prove(choice.assignment)
                found.correct(chooser)
                if found.taken_bytes <= _LEAST * choice.bound:
                    break
            # Many choices may hold as little: of these the fastest.
            for _ in range(min(self.patience, _LOOKS)):
                least = min(tried.values(), key=lambda each: each.taken_bytes)
                faster = chooser.fastest(least.taken_bytes, among)
                if faster is None or faster.assignment in tried:
                    break
                found = tried[faster.assignment] = self.prove(faster.assignment)
                found.correct(chooser)
            self._small[among, floor_bytes] = tried
        return self._small[among, floor_bytes]

    @functools.cached_property
    def _alike(self) -> list[Assignment]:
        """Choices with one candidate for all blocks that have it, as one would write by hand.

        What many do to the link and to an allocator is least like what one does that is tried beside others: a plan for
        an EfficientNet took 1.36 of the time of one that offloads and checkpoints each block.
        """
        paths = self.costs.paths
        rows = Counter(map(template, paths))
        blocks = [row for row, path in enumerate(paths) if rows[template(path)] > 1]
        kinds = dict.fromkeys(each for row in blocks for each in self.costs.candidates[row][1:])
        if self._link is not None and self._link.cap_bytes is not None:  # only the solver counts that
            kinds = {each: None for each in kinds if not each.techniques & MOVES}
        return [
            tuple(
                menu.index(kind) if row in blocks and kind in menu else 0
                for row, menu in enumerate(self.costs.candidates)
            )
            for kind in (kinds if self.patience >= _ROUNDS else ())
        ]

    def _whole(self, assignment: Assignment) -> Trace:
        if assignment == self.costs.as_it_is:
            return self.plain
        return self._simulate(self._with(self.costs.rules(assignment)), True, _WHOLE)

    def _with(self, rules: Rules) -> Rules:
        # A later rule composes outside an earlier one.
        return (*rules, *self.always)


def _best(found: Iterable[Proven], most_bytes: int) -> Proven | None:
    fitting = [each for each in found if each.taken_bytes <= most_bytes]
    return min(fitting, key=lambda each: each.preference, default=None)


def _reaches(found: Iterable[Proven], floor_bytes: int) -> bool:
    """Whether one of these holds no more than what every step does."""
    return any(
        max(each.profile.first_step_peak_bytes, each.profile.peak_bytes) <= _LEAST * floor_bytes for each in found
    )


def _coarsest(low: int, high: int) -> int | None:
    """Of the numbers between two, both exclusive, the one that most powers of two divide; None without one.

    >>> _coarsest(64, 100), _coarsest(70, 100), _coarsest(96, 98), _coarsest(96, 97)
    (96, 96, 97, None)
    """
    found, step = None, 1
    while (number := (low // step + 1) * step) < high and found != 0:
        found, step = number, 2 * step
    return found
