"""The choice: for each part the candidate with which the step is fastest and its bytes stay below a limit everywhere.

A mixed-integer program: one binary variable for each candidate of each part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from memscale.planning.solving.local_search import INTEGRAL, LocalSearch
from memscale.planning.solving.program import GAP, Floats, Program
from memscale.planning.trials.costs import Assignment, Bytes, Costs
from memscale.planning.trials.trial_rows import MOVES

# Of programs with more binaries the search takes long: 2 s for 160, of 12 blocks, and 16 s for 560, of 32. The relaxed
# program's choice, its fractional parts decided, is within 0.4 % and 0.05 % of what it finds: many parts divide finely.
_WHOLE = 100
_MIB = 2.0**20

# So much more is about as little.
_NEAR = 1e-2

# Of what candidates that move bytes are thought to wait, at least and at most what one step may show.
_LEAST_SCALE, _MOST_SCALE = 0.25, 4.0


@dataclass(frozen=True)
class LinkRates:
    """How fast bytes move between the device and the tier below it, each way; and how many may lie there."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    cap_bytes: int | None = None


@dataclass(frozen=True)
class Choice:
    """A candidate for each part.

    Attributes:
        assignment: by part, the number of the candidate.
        bound: no assignment does better than this: seconds, or bytes where the least bytes were asked for.
    """

    assignment: Assignment
    bound: float


class Chooser:
    """Chooses among the candidates of `costs`.

    Args:
        costs: of the candidates.
        link: None if nothing moves.

    Attributes:
        moving_scale: how much longer moves hold the step up than is thought, as a step has shown.
        beside_bytes: [candidate of what is outside, interval] what steps have shown to be held beside the sum of the
            costs. Exactly one of these candidates is chosen, so that each brings its own correction.
    """

    def __init__(self, costs: Costs, link: LinkRates | None) -> None:
        self.costs = costs
        self.link = link
        self._offsets = np.cumsum([0, *(len(menu) for menu in costs.effects)]).tolist()
        flat = [effect for menu in costs.effects for effect in menu]
        self._held = np.array([effect.held_bytes - effect.slack_bytes for effect in flat], dtype=np.float64) / _MIB
        self._families: dict[object, list[int]] = {}
        for row in range(len(costs.effects)):
            # What a group does hangs together with what its own members do.
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
        # Of activations: while forward runs they go out, while backward runs they come back. A trial in which one part
        # moves does not show what it is to share the link with all others.
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
        self.beside_bytes = np.zeros((len(self.costs.effects[-1]), len(self.costs.intervals)))
        self._shown: set[int] = set()
        self._operators = np.array(
            [effect.forward_seconds + effect.backward_seconds for menu in self.costs.effects for effect in menu]
        )

    @property
    def _seconds(self) -> Floats:
        """[candidate] what it adds to the step."""
        found: Floats = self._operators + self.moving_scale * self._moving
        return found

    def seconds(self, assignment: Assignment) -> float:
        """The time of the step under an assignment, as far as is thought."""
        columns = self._columns(assignment)
        waits = self.moving_scale * self._lacks_seconds(columns)
        return self.costs.fixed_seconds + float(self._seconds[columns].sum()) + waits

    def _link_seconds(self) -> list[Floats]:
        """[candidate], once for each way of the link: by how much longer it holds the link than it computes, less what
        it is thought to wait anyway."""
        if self.link is None or not self._shared.any():
            return []
        rates = (self.link.out_bytes_per_second, self.link.in_bytes_per_second)
        return [self._shared / rate - window - self._moving for rate, window in zip(rates, self._window, strict=True)]

    def _lacks_seconds(self, columns: list[int]) -> float:
        """How long the step waits because the link is too slow for all that shares it."""
        return max([0.0, *(float(each[columns].sum()) for each in self._link_seconds())])

    def _takes_seconds(self, cost: Floats, assignment: Assignment) -> float:
        """What the program of these costs has to be the least."""
        columns = self._columns(assignment)
        return float(cost[columns].sum()) + self.moving_scale * self._lacks_seconds(columns)

    def _columns(self, assignment: Assignment) -> list[int]:
        return [offset + number for offset, number in zip(self._offsets, assignment, strict=False)]

    def correct(self, assignment: Assignment, held_bytes: Bytes, part_seconds: Floats, step_seconds: float) -> None:
        """Learn from a simulated step: what it held beside what was thought, what candidates and their moves took."""
        self._shown.add(assignment[-1])
        # Of those that no step has shown this one tells most.
        for number in {*range(len(self.beside_bytes)), assignment[-1]} - (self._shown - {assignment[-1]}):
            self.beside_bytes[number] = held_bytes - self.costs.held_bytes(assignment)
        columns = self._columns(assignment)
        if thought := float(self._moving[columns].sum()) + self._lacks_seconds(columns):
            shown = step_seconds - float(part_seconds.sum()) - self.costs.fixed_seconds
            self.moving_scale = min(max(shown / thought, _LEAST_SCALE), _MOST_SCALE)
        # Parts that are alike are to have the same, or which of them has which candidate would be decided by traces.
        outside = len(assignment) - 1
        for rows in self._apart(assignment).values():
            if rows == [outside] and any(assignment[row] for row in self.costs.groups):
                continue  # a group has code beside that of its members
            for number in {assignment[row] for row in rows}:
                shown = np.mean([part_seconds[row] for row in rows if assignment[row] == number])
                for row in rows:
                    self._operators[self._offsets[row] + number] = shown

    def _apart(self, assignment: Assignment) -> dict[object, list[int]]:
        """The parts that are alike and decided about one by one: no group, and none inside one that is chosen."""
        none = self.costs.covered(assignment) | self.costs.groups.keys()
        found = {alike: [row for row in rows if row not in none] for alike, rows in self._families.items()}
        return {alike: rows for alike, rows in found.items() if rows}

    def fastest(self, limit_bytes: float, among: Collection[str] | None = None) -> Choice | None:
        """The fastest choice that holds at most `limit_bytes` at each interval, None if there is none.

        Args:
            limit_bytes: what the step may hold.
            among: the techniques of which candidates may be chosen; None is all.
        """
        # Of equals, few changes come before many, and early parts change before late ones.
        scale = 1e-7 * max(self.costs.seconds(self.costs.as_it_is), 1e-9)
        ties = np.concatenate(
            [
                [scale * bool(number) * (1 + part / (10 * len(self.costs.effects))) for number in range(len(menu))]
                for part, menu in enumerate(self.costs.effects)
            ]
        )
        return self._solve(self._seconds + ties, limit_bytes / _MIB, among)

    def smallest(self, among: Collection[str] | None = None) -> Choice:
        """The choice whose most bytes are the fewest, among techniques as in `fastest`."""
        choice = self._solve(np.zeros(len(self._moving)), None, among)
        assert choice is not None, "the step as it is takes some number of bytes"
        return choice

    def uniform(self, assignment: Assignment, among: Collection[str]) -> Assignment:
        """The assignment with one candidate for all that are alike and move nothing: of those with which the step holds
        about the least, and keeps about the least all the time, the fastest; late parts stream if that fits as well.

        Of GPT-2, all blocks checkpointed, the allocator had 5.6 % beside what was allocated with the last block
        streamed, and 8.3 to 8.6 % with one of the first two or the last but one.
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
        """The most that the step is thought to hold under an assignment."""
        return float(self._local_search(assignment).held_by(assignment).max() * _MIB)

    def _local_search(self, assignment: Assignment) -> LocalSearch:
        """With what is thought of the candidates now; of those that are decided about beside the groups of one."""
        return LocalSearch(
            self.costs.candidates,
            self._apart(assignment),
            self._offsets,
            self._seconds,
            self._held_now(),
            self._together,
            self._streams,
            self._out,
            None if self.link is None else self.link.cap_bytes,
        )

    def _held_now(self) -> Floats:
        """[candidate, interval] with the corrections, in MiB."""
        held = self._held.copy()
        held[self._offsets[-2] :] += self.beside_bytes / _MIB
        return held

    def _relaxed(
        self, cost: Floats, limit: float | None, among: Collection[str] | None
    ) -> tuple[Program | None, list[int]]:
        """The program of least cost within the limit, or of the fewest bytes, solved but for that its parts may be
        divided, with the columns that count those that stream; None if it has no solution."""
        least, columns = limit is None, len(cost)
        unit = 1.0 if least else self._unit
        # Beside the binaries: the peak; or how long the step waits for the link that all share.
        lacks = [] if least else [each / unit for each in self._link_seconds()]
        beside = [1.0] if least else [self.moving_scale] if lacks else []
        upper = np.r_[self._allowed(among), np.full(len(beside), np.inf)]
        program = Program(np.r_[cost / unit, beside], upper)
        for each in lacks:
            program.add_row(-np.inf, 0.0, np.arange(columns + 1), np.r_[each, -1.0])
        for low, high in zip(self._offsets, self._offsets[1:], strict=False):
            program.add_row(1.0, 1.0, np.arange(low, high), np.ones(high - low))
        held = self._held_now().T
        rows = [held, np.full((len(held), len(beside)), -1.0 if least else 0.0)]
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
        """[candidate] 1 if it is made of these techniques, else 0."""
        return np.array([among is None or each <= set(among) for each in self._techniques], dtype=np.float64)

    def _solve(self, cost: Floats, limit: float | None, among: Collection[str] | None = None) -> Choice | None:
        """The choice of least cost within the limit; without a limit, the one whose most bytes are the fewest."""
        program, counts = self._relaxed(cost, limit, among)
        if program is None:
            return None
        columns, allowed, unit = len(cost), self._allowed(among), self._unit
        relaxed, bound = program.values[:columns], program.bound
        search, free = self._beside_groups(relaxed, allowed)
        quick = None if limit is None else search.rounded(relaxed, limit, free)
        if limit is not None and quick is not None:
            quick = search.in_order(search.polished(quick, limit, free), limit)
            if self._takes_seconds(cost, quick) <= bound * (1 + GAP) * unit:
                return Choice(quick, bound * unit + self.costs.fixed_seconds)
        program.whole([*range(columns), *counts])
        # What the relaxed program has decided may leave no way to decide the rest: then each fourth part is free as
        # well, and at last all are.
        for freed in (0, 4, 1) if columns > _WHOLE else (1,):
            program.between(range(columns), *self._decided(relaxed, allowed, freed))
            if program.solve(surely=freed == 1):
                break
        else:
            return None
        values = program.values
        bound = max(bound, program.bound) if freed == 1 else bound
        assignment = self._most(values)
        if limit is None:
            return Choice(assignment, bound * _MIB)
        search, free = self._beside_groups(values, allowed)
        polished = search.in_order(search.polished(assignment, limit, free), limit)
        return Choice(polished, bound * unit + self.costs.fixed_seconds)

    def _most(self, values: Floats) -> Assignment:
        """The candidate of each part that has the most of it."""
        return tuple(
            int(np.argmax(values[low:high])) for low, high in zip(self._offsets, self._offsets[1:], strict=False)
        )

    def _beside_groups(self, values: Floats, allowed: Floats) -> tuple[LocalSearch, Floats]:
        """The local search among parts that are in no group that `values` choose, and the candidates left to them."""
        chosen = self._most(values)
        search, free = self._local_search(chosen), allowed.copy()
        for row in {*range(len(chosen))} - {row for rows in search.families.values() for row in rows}:
            free[self._offsets[row] : self._offsets[row + 1]] = 0.0
            free[self._offsets[row] + chosen[row]] = 1.0
        return search, free

    def _decided(self, values: Floats, allowed: Floats, freed: int) -> tuple[Floats, Floats]:
        """Bounds that fix the parts for which `values` choose one candidate, but for each part whose number is
        divided by `freed`."""
        low_bounds, high_bounds = np.zeros(len(values)), allowed.copy()
        for part, (low, high) in enumerate(zip(self._offsets, self._offsets[1:], strict=False)):
            chosen = values[low:high] >= INTEGRAL
            if chosen.any() and (not freed or part % freed):
                low_bounds[low:high] = high_bounds[low:high] = chosen
        return low_bounds, high_bounds

    def _add_streaming(self, program: Program) -> None:
        """A variable that is 1 if any part streams, and 0 if none does."""
        which = np.flatnonzero(self._streams)
        apart = program.add_columns(np.zeros(1), np.ones(1))
        program.add_row(0.0, float(len(which)), [*which, apart], [*np.ones(len(which)), -1.0])

    def _exclude(self, program: Program) -> list[int]:
        """What a group is chosen for excludes what its members are; returns its columns, which are to be whole."""

        def choices(row: int) -> range:
            return range(self._offsets[row] + 1, self._offsets[row + 1])

        groups = self.costs.groups
        for member in sorted({each for members in groups.values() for each in members}):
            of = [row for row, members in groups.items() if member in members]
            which = [column for row in (member, *of) for column in choices(row)]
            program.add_row(-np.inf, 1.0, which, np.ones(len(which)))
        return [column for row in groups for column in choices(row)]

    def _count_streamed(self, program: Program) -> list[int]:
        """How many of those that are alike stream is a variable of its own; returns these, which are to be whole.

        To stream one more costs so much more than all else that a bound rests on this number, and where a binary of one
        part is decided another takes its place: 7 s for a Llama of 32 blocks, and 0.3 s with this.
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
