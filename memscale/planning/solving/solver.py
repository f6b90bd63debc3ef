"""`Chooser`: chooses one candidate for each part, for the fastest step whose bytes stay below a limit.

A mixed-integer program with a binary x[p, c] for each candidate c of each part p, and y = 1 if any part streams::

    minimize    sum of x[p, c] * seconds[p, c]  +  moving_scale * (wait for the shared link)
    subject to  sum over c of x[p, c] = 1                                       for each part p
                sum of x[p, c] * held[p, c, t] - y * together[t] <= limit       for each interval t of the step

NOTE: The costs are measured part by part (see `trials/`). A simulated step of a whole choice shows by how much the sum
of the costs is wrong; `correct` takes over the difference, and the next program is solved with the corrected costs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from memscale.planning.solving.local_search import LocalSearch, intervals_that_matter
from memscale.planning.solving.program import GAP, INTEGRAL, Floats, Program
from memscale.planning.trials.costs import Assignment, Bytes, Costs
from memscale.planning.trials.trial_rows import MOVES

# Binaries up to which the whole integer program is solved. In a larger program the parts that the relaxed program
# decides are fixed first: the search over all parts takes seconds, and finds steps that are less than 0.5 % faster:
# benchmarks/bench_simulate.py --plan.
_WHOLE = 100
# Binaries above which a rounded solution is taken as it is: the integer program of one long row of a Llama 8B (650
# binaries) takes minutes, and a rounded solution is as near to the bound: benchmarks/bench_long_context.py.
_MOST_WHOLE = 400
# Bytes in the unit of the program, in which its numbers are near to 1. Source: IEC 80000-13.
_MIB = 2.0**20

# Share by which two numbers of bytes may differ to count as about equal, so that the faster choice is the smallest:
# benchmarks/bench_plan.py --smallest.
_NEAR = 1e-2

# The range of `moving_scale`: the ratio of the waits of a simulated step to the estimated waits:
# benchmarks/bench_simulate.py --plan counts simulations.
_LEAST_SCALE, _MOST_SCALE = 0.25, 4.0


@dataclass(frozen=True)
class LinkRates:
    """The rates of the link between the device and the tier below, each way, and the bytes that may lie on the tier.

    ``cap_bytes=None`` means: no limit.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    cap_bytes: int | None = None


@dataclass(frozen=True)
class Choice:
    """A choice of one candidate for each part.

    Attributes:
        assignment: by part, the number of the candidate.
        bound: a lower bound over all assignments, in seconds; in bytes if the fewest bytes were asked for.
    """

    assignment: Assignment
    bound: float


class Chooser:
    """A chooser among the candidates of `costs`, corrected by simulated steps.

    Args:
        costs: the costs of the candidates.
        link: the rates of the link to the tier below; None if no candidate moves bytes.

    Attributes:
        moving_scale: the ratio of the waits for moves in the last simulated step to the estimated waits.
        extra_bytes: [candidate of the rest of the model, interval] bytes that simulated steps held in addition to the
            sum of the costs. A choice has exactly one candidate for the rest, and thus exactly one correction.
    """

    def __init__(self, costs: Costs, link: LinkRates | None) -> None:
        self.costs = costs
        self.link = link
        self._offsets = np.cumsum([0, *(len(menu) for menu in costs.effects)]).tolist()
        flat = [effect for menu in costs.effects for effect in menu]
        self._held = np.array([effect.held_bytes - effect.slack_bytes for effect in flat], dtype=np.float64) / _MIB
        self._families: dict[object, list[int]] = {}
        for row in range(len(costs.effects)):
            # A group is a family of its own, since its candidates exclude those of its own members.
            single = row >= len(costs.parts) or row in costs.groups
            self._families.setdefault(row if single else costs.parts[row].alike, []).append(row)
        self._out = np.array([effect.out_bytes for effect in flat], dtype=np.float64)
        self._moving = np.array([effect.moving_seconds for effect in flat])
        self._techniques = [
            costs.techniques(row, number) for row, menu in enumerate(costs.candidates) for number in range(len(menu))
        ]
        self._streams = np.array(["stream" in each for each in self._techniques])
        together = costs.together_bytes if self._streams.any() else None
        self._together = np.zeros(len(costs.intervals)) if together is None else together / _MIB
        # Bytes of activations that go out during forward and come back during backward, over a link that all offloading
        # parts share. A trial in which one part moves does not show the waits for a shared link.
        self._shared = np.array(
            [
                0 if "stream" in techniques else effect.out_bytes
                for techniques, effect in zip(self._techniques, flat, strict=True)
            ],
            dtype=np.float64,
        )
        self._window = np.array([[effect.forward_seconds, effect.backward_seconds] for effect in flat]).T
        self._unit = max(costs.seconds(costs.as_it_is), 1e-12)
        self.moving_scale = 1.0
        self.extra_bytes = np.zeros((len(self.costs.effects[-1]), len(self.costs.intervals)))
        self._shown: set[int] = set()
        self._operators = np.array(
            [effect.forward_seconds + effect.backward_seconds for menu in self.costs.effects for effect in menu]
        )

    @property
    def _seconds(self) -> Floats:
        """Returns [candidate] the seconds that the candidate adds to the step."""
        found: Floats = self._operators + self.moving_scale * self._moving
        return found

    def seconds(self, assignment: Assignment) -> float:
        """Returns the estimated seconds of the step under an assignment."""
        columns = self._columns(assignment)
        waits = self.moving_scale * self._lacks_seconds(columns)
        return self.costs.fixed_seconds + float(self._seconds[columns].sum()) + waits

    def _link_seconds(self) -> list[Floats]:
        """Returns [candidate] for each direction of the link: seconds of copies less seconds of compute and of waits.

        The sum over a choice, if above 0, is the time that the step waits for the link. Waits that a candidate's own
        effect counts already are subtracted.
        """
        if self.link is None or not self._shared.any():
            return []
        rates = (self.link.out_bytes_per_second, self.link.in_bytes_per_second)
        return [self._shared / rate - window - self._moving for rate, window in zip(rates, self._window, strict=True)]

    def _lacks_seconds(self, columns: list[int]) -> float:
        """Returns the seconds that the step waits because the link is too slow for all chosen copies together."""
        return max([0.0, *(float(each[columns].sum()) for each in self._link_seconds())])

    def _takes_seconds(self, cost: Floats, assignment: Assignment) -> float:
        """Returns the objective of the program with these costs, in seconds, at an assignment."""
        columns = self._columns(assignment)
        return float(cost[columns].sum()) + self.moving_scale * self._lacks_seconds(columns)

    def _columns(self, assignment: Assignment) -> list[int]:
        return [offset + number for offset, number in zip(self._offsets, assignment, strict=False)]

    def correct(self, assignment: Assignment, held_bytes: Bytes, part_seconds: Floats, step_seconds: float) -> None:
        """Corrects the costs by a simulated step.

        Args:
            assignment: the choice that was simulated.
            held_bytes: [interval] bytes that the step held.
            part_seconds: [part] seconds of the part's operators in the step.
            step_seconds: seconds of the step.
        """
        self._shown.add(assignment[-1])
        # A candidate for the rest of the model that no step has shown yet gets the correction of this step.
        for number in {*range(len(self.extra_bytes)), assignment[-1]} - (self._shown - {assignment[-1]}):
            self.extra_bytes[number] = held_bytes - self.costs.held_bytes(assignment)
        self.__dict__.pop("_matter", None)
        columns = self._columns(assignment)
        if thought := float(self._moving[columns].sum()) + self._lacks_seconds(columns):
            shown = step_seconds - float(part_seconds.sum()) - self.costs.fixed_seconds
            self.moving_scale = min(max(shown / thought, _LEAST_SCALE), _MOST_SCALE)
        # Parts that are alike get their mean, or small differences in the trace would decide which part has which
        # candidate.
        outside = len(assignment) - 1
        for rows in self._apart(assignment).values():
            if rows == [outside] and any(assignment[row] for row in self.costs.groups):
                continue  # the seconds of the rest include the group's own code, which the costs count to the group
            for number in {assignment[row] for row in rows}:
                shown = np.mean([part_seconds[row] for row in rows if assignment[row] == number])
                for row in rows:
                    self._operators[self._offsets[row] + number] = shown

    def _apart(self, assignment: Assignment) -> dict[object, list[int]]:
        """Returns the families of alike parts without groups and without members of chosen groups."""
        none = self.costs.covered(assignment) | self.costs.groups.keys()
        found = {alike: [row for row in rows if row not in none] for alike, rows in self._families.items()}
        return {alike: rows for alike, rows in found.items() if rows}

    def fastest(self, limit_bytes: float, among: Collection[str] | None = None) -> Choice | None:
        """Returns the fastest choice that holds at most `limit_bytes` at each interval; None if no choice does.

        Args:
            limit_bytes: bytes that the step may hold.
            among: the techniques that candidates may be made of; None allows all.
        """
        # Ties: of equally fast choices the program takes the one with fewer changes, and with changes in early parts.
        scale = 1e-7 * max(self.costs.seconds(self.costs.as_it_is), 1e-9)
        ties = np.concatenate(
            [
                [scale * bool(number) * (1 + part / (10 * len(self.costs.effects))) for number in range(len(menu))]
                for part, menu in enumerate(self.costs.effects)
            ]
        )
        return self._solve(self._seconds + ties, limit_bytes / _MIB, among)

    def smallest(self, among: Collection[str] | None = None) -> Choice:
        """Returns the choice with the smallest peak; `among` is as in `fastest`."""
        choice = self._solve(np.zeros(len(self._moving)), None, among)
        assert choice is not None, "the step as written takes some number of bytes"
        return choice

    def uniform(self, assignment: Assignment, among: Collection[str]) -> Assignment:
        """Returns the assignment with one candidate for all repeated parts that move nothing.

        Of the candidates with about the smallest peak, and of these the ones with about the fewest bytes over all
        intervals, the fastest is taken. Late parts stream rather than early ones if that fits as well: the allocator
        then reserves less beyond the allocated bytes.
        """
        allowed, columns = self._allowed(among) > 0, self._columns(assignment)
        rows = [
            row
            for family in self._apart(assignment).values()
            for row in (family if len(family) > 1 else ())
            if not self._techniques[columns[row]] & MOVES
        ]
        search, found = self._local_search(assignment), dict[Assignment, Floats]()
        for kind in dict.fromkeys(each for row in rows for each in self.costs.candidates[row]):
            other = list(assignment)
            for row in rows if not kind.techniques & MOVES else ():
                menu = self.costs.candidates[row]
                if kind in menu and allowed[self._offsets[row] + menu.index(kind)]:
                    other[row] = menu.index(kind)
            found[tuple(other)] = search.held_by(tuple(other))
        for much in (np.max, np.sum):
            least = min((float(much(each)) for each in found.values()), default=0.0)
            found = {each: held for each, held in found.items() if much(held) <= (1 + _NEAR) * least}
        best = min(found, key=self.seconds, default=assignment)
        return search.in_order(best, float(search.held_by(assignment).max()))

    def held_bytes(self, assignment: Assignment) -> float:
        """Returns the estimated peak bytes of the step under an assignment."""
        return float(self._local_search(assignment).held_by(assignment).max() * _MIB)

    def _local_search(self, assignment: Assignment) -> LocalSearch:
        """Returns the local search by the corrected costs, over parts outside the groups that `assignment` chooses."""
        return LocalSearch(
            self.costs.candidates,
            self._apart(assignment),
            self._offsets,
            self._seconds,
            self._held_now(),
            self._together,
            self._matter,
            self._streams,
            self._out,
            None if self.link is None else self.link.cap_bytes,
        )

    @functools.cached_property
    def _matter(self) -> list[int]:
        """Returns the intervals at which some choice can have its peak by the corrected costs."""
        return intervals_that_matter(self._held_now(), self._together)

    def _held_now(self) -> Floats:
        """Returns [candidate, interval] the corrected bytes that the candidate holds, in MiB."""
        held = self._held.copy()
        held[self._offsets[-2] :] += self.extra_bytes / _MIB
        return held

    def _relaxed(
        self, cost: Floats, limit: float | None, among: Collection[str] | None
    ) -> tuple[Program | None, list[int]]:
        """Returns the relaxed program, solved, and its columns that count streaming parts; None if infeasible.

        In the relaxed program a part may be divided among its candidates, but the counts of streaming parts and the
        candidates of groups are integers. Without a limit the program minimizes the peak instead of the time.
        """
        least, columns = limit is None, len(cost)
        unit = 1.0 if least else self._unit
        # One column in addition to the binaries: the peak in MiB, or the wait for the shared link.
        lacks = [] if least else [each / unit for each in self._link_seconds()]
        extra = [1.0] if least else [self.moving_scale] if lacks else []
        upper = np.r_[self._allowed(among), np.full(len(extra), np.inf)]
        program = Program(np.r_[cost / unit, extra], upper)
        for each in lacks:
            program.add_row(-np.inf, 0.0, np.arange(columns + 1), np.r_[each, -1.0])
        for low, high in zip(self._offsets, self._offsets[1:], strict=False):
            program.add_row(1.0, 1.0, np.arange(low, high), np.ones(high - low))
        held = self._held_now().T
        rows = [held, np.full((len(held), len(extra)), -1.0 if least else 0.0)]
        if self._together.any():
            self._add_streaming(program)
            rows.append(-self._together[:, None])
        program.wait(np.concatenate(rows, axis=1), 0.0 if limit is None else limit)
        counts, groups = self._count_streamed(program), self._exclude(program)
        cap_bytes = None if self.link is None else self.link.cap_bytes
        if cap_bytes is not None and (which := np.flatnonzero(self._out)).size:
            program.add_row(-np.inf, cap_bytes / _MIB, which, self._out[which] / _MIB)
        return (program, counts) if program.branch([*counts, *groups]) else (None, [])

    def _allowed(self, among: Collection[str] | None) -> Floats:
        """Returns [candidate] 1 if all techniques of the candidate are in `among` (None: always), else 0."""
        return np.array([among is None or each <= set(among) for each in self._techniques], dtype=np.float64)

    def _solve(self, cost: Floats, limit: float | None, among: Collection[str] | None = None) -> Choice | None:
        """Returns the choice of least cost within the limit; without a limit, the choice with the smallest peak."""
        program, counts = self._relaxed(cost, limit, among)
        if program is None:
            return None
        columns, allowed, unit = len(cost), self._allowed(among), self._unit
        relaxed, bound = program.values[:columns], program.bound
        quick = self._most(relaxed) if limit is None else self._rounded(relaxed, limit, allowed)
        unit_bound = bound * _MIB if limit is None else bound * unit + self.costs.fixed_seconds
        quickly = None if quick is None else Choice(quick, unit_bound)
        if quick is not None and limit is not None:
            near = self._takes_seconds(cost, quick) <= bound * (1 + GAP) * unit
            if near or columns > _MOST_WHOLE:
                return quickly
        program.whole([*range(columns), *counts])
        # The parts that the relaxed program decides are fixed first. If that leaves no solution, every fourth part is
        # freed, and then all parts.
        turns = (1,) if columns <= _WHOLE else (0, 4, 1) if columns <= _MOST_WHOLE or quick is None else (0, 4)
        for freed in turns:
            program.between(range(columns), *self._decided(relaxed, allowed, freed))
            if program.solve(surely=freed == 1):
                break
        else:
            return quickly
        bound = max(bound, program.bound) if freed == 1 else bound
        assignment = self._most(program.values)
        if limit is None:
            return Choice(assignment, bound * _MIB)
        search, free = self._outside_groups(program.values, allowed)
        polished = search.in_order(search.polished(assignment, limit, free), limit)
        best = min(filter(None, (polished, quick)), key=lambda each: self._takes_seconds(cost, each))
        return Choice(best, bound * unit + self.costs.fixed_seconds)

    def _rounded(self, relaxed: Floats, limit: float, allowed: Floats) -> Assignment | None:
        """Returns the solution of the relaxed program rounded, repaired and polished; None if rounding fails."""
        search, free = self._outside_groups(relaxed, allowed)
        found = search.rounded(relaxed, limit, free)
        return None if found is None else search.in_order(search.polished(found, limit, free), limit)

    def _most(self, values: Floats) -> Assignment:
        """Returns the candidate of each part with the largest value."""
        return tuple(
            int(np.argmax(values[low:high])) for low, high in zip(self._offsets, self._offsets[1:], strict=False)
        )

    def _outside_groups(self, values: Floats, allowed: Floats) -> tuple[LocalSearch, Floats]:
        """Returns the local search outside the groups that `values` choose, and [candidate] 1 if it may be chosen.

        Groups, and members of chosen groups, keep the candidate that `values` choose.
        """
        chosen = self._most(values)
        search, free = self._local_search(chosen), allowed.copy()
        for row in {*range(len(chosen))} - {row for rows in search.families.values() for row in rows}:
            free[self._offsets[row] : self._offsets[row + 1]] = 0.0
            free[self._offsets[row] + chosen[row]] = 1.0
        return search, free

    def _decided(self, values: Floats, allowed: Floats, freed: int) -> tuple[Floats, Floats]:
        """Returns bounds that fix the parts for which `values` choose one candidate.

        A part whose number is a multiple of `freed` stays free; 0 frees no part.
        """
        low_bounds, high_bounds = np.zeros(len(values)), allowed.copy()
        for part, (low, high) in enumerate(zip(self._offsets, self._offsets[1:], strict=False)):
            chosen = values[low:high] >= 1 - INTEGRAL
            if chosen.any() and (not freed or part % freed):
                low_bounds[low:high] = high_bounds[low:high] = chosen
        return low_bounds, high_bounds

    def _add_streaming(self, program: Program) -> None:
        """Adds a variable that is 1 if any part streams, and 0 if none does."""
        which = np.flatnonzero(self._streams)
        apart = program.add_columns(np.zeros(1), np.ones(1))
        program.add_row(0.0, float(len(which)), [*which, apart], [*np.ones(len(which)), -1.0])

    def _exclude(self, program: Program) -> list[int]:
        """Adds the rule that of a part and the groups around that part at most one is changed.

        Returns the columns of the groups' candidates, which must be integers.
        """

        def choices(row: int) -> range:
            return range(self._offsets[row] + 1, self._offsets[row + 1])

        groups = self.costs.groups
        for member in sorted({each for members in groups.values() for each in members}):
            of = [row for row, members in groups.items() if member in members]
            which = [column for row in (member, *of) for column in choices(row)]
            program.add_row(-np.inf, 1.0, which, np.ones(len(which)))
        return [column for row in groups for column in choices(row)]

    def _count_streamed(self, program: Program) -> list[int]:
        """Adds an integer variable for each family of alike parts: how many of them stream; returns these columns.

        Branching on the count is what makes the search fast: one more streaming part costs more than all else, and
        after a branch on the binary of one part, an alike part replaces it at the same cost.
        """
        counts = []
        for rows in self._families.values():
            menu = self.costs.candidates[rows[0]]
            streams = [number for number, each in enumerate(menu) if "stream" in each.techniques]
            if len(rows) > 1 and streams:
                which = [self._offsets[row] + number for row in rows for number in streams]
                count = program.add_columns(np.zeros(1), np.array([float(len(rows))]))
                program.add_row(0.0, 0.0, [*which, count], [*np.ones(len(which)), -1.0])
                counts.append(count)
        return counts
