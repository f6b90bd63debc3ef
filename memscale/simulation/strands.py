"""The events of a simulated step, apart by the turns that its parts have in it."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from memscale.simulation.attribution import OUTSIDE, Owners
from memscale.simulation.ledger import Ledger, Phase

#: A turn in a step: (phase, part, outside); what is outside counts to the turn of the part before it.
Turn = tuple[Phase, int, bool]

START: Turn = (Phase.FORWARD, OUTSIDE, True)
TRIM = 0  # in place of an event: the device is given back what is only cached
UPDATE: Turn = (Phase.OPTIMIZER, OUTSIDE, True)


class _Place(NamedTuple):
    """Where a storage is made or freed: by which part, in which phase, in which run of events of which step."""

    part: int
    phase: Phase
    run: int
    step: int


class Strand:
    """The events of a simulated step by the turns of its parts.

    Args:
        ledger: with `add_in_place` done.
        paths: of the parts, none inside another.
    """

    def __init__(self, ledger: Ledger, paths: Sequence[str]) -> None:
        self.records = ledger.records
        self.paths = paths
        self._owners = Owners(paths)
        self.before = ledger.events[: ledger.steps[0][0]]
        self.made: dict[int, _Place] = {}
        self.freed: dict[int, _Place] = {}
        self.runs: list[list[tuple[Turn, list[int]]]] = []
        ends = [*ledger.steps[1:], (len(ledger.events), len(ledger.ops))]
        for number, (first, last) in enumerate(zip(ledger.steps, ends, strict=True)):
            self.runs.append(list(self._runs(ledger, first, last, number)))
        # What an engine brings back: bytes without a dtype.
        self._loads = {
            number
            for number in self.made
            if (record := self.records[number]).dtype == "uint8" and ledger.ops[record.op].name == "aten::new_empty"
        }

    def _runs(
        self, ledger: Ledger, first: tuple[int, int], last: tuple[int, int], step: int
    ) -> Iterator[tuple[Turn, list[int]]]:
        turns, turn = list[Turn](), START
        for op in ledger.ops[first[1] : last[1]]:
            part = self._owners.of(op.path)
            if part != OUTSIDE:
                turn = (op.phase, part, False)
            elif op.phase is Phase.OPTIMIZER:
                turn = UPDATE
            else:
                turn = (turn[0], turn[1], True)
            turns.append(turn)
        run: list[int] = []
        now, count = START, 0
        trims = set(ledger.trims)
        for at in range(first[0], last[0]):
            event, number = ledger.events[at], ledger.event_ops[at]
            turn = turns[number - first[1]] if number >= first[1] else START
            if turn != now and run:
                yield now, run
                run, count = [], count + 1
            now = turn
            if at in trims:
                run.append(TRIM)
            phase = ledger.ops[number].phase if number >= first[1] else Phase.FORWARD
            place = _Place(OUTSIDE if turn[2] else turn[1], phase, count, step)
            (self.made if event > 0 else self.freed)[abs(event) - 1] = place
            run.append(event)
        yield now, run

    def owner(self, number: int) -> int:
        """The part whose parameter, gradient or state this is."""
        return self.owner_of(self.records[number].path)

    def owner_of(self, path: str) -> int:
        """The part that has the module or parameter at `path`."""
        return self._owners.of(path)

    @functools.cached_property
    def last(self) -> dict[Turn, list[list[int]]]:
        """The runs of each turn in the last step."""
        found = defaultdict(list)
        for turn, run in self.runs[-1]:
            found[turn].append(run)
        return found

    def stays(self, number: int) -> bool:
        """Whether it is still there after the last step."""
        return number not in self.freed

    def leaves(self, number: int) -> bool:
        """Whether another part frees it than the one that made it."""
        made, freed = self.made[number], self.freed.get(number)
        return freed is not None and freed.step == made.step and freed.part != made.part

    def is_away(self, part: int) -> bool:
        """Whether parameters of the part live on another tier."""
        return part in self._away

    @functools.cached_property
    def _away(self) -> frozenset[int]:
        gone = {-event - 1 for event in self.before if event < 0}
        return frozenset(
            self.owner(number)
            for number, record in enumerate(self.records[: len(self.before)])
            if record.category == "parameter" and (record.away or number in gone)
        )

    @functools.cached_property
    def ahead(self) -> Mapping[int, list[tuple[Turn, int]]]:
        """By part, what is made for it in the turn of another one: loads ahead."""
        found: dict[int, list[tuple[Turn, int]]] = defaultdict(list)
        for number in sorted(self._loads):
            made, freed = self.made[number], self.freed.get(number)
            if (
                freed is not None
                and made.step == freed.step == len(self.runs) - 1
                and OUTSIDE != freed.part != made.part
            ):
                found[freed.part].append((self.runs[-1][made.run][0], number))
        return found

    @functools.cached_property
    def not_its_own(self) -> frozenset[int]:
        """What the turn in which it is made does not answer for."""
        return frozenset(number for loads in self.ahead.values() for _, number in loads)

    @functools.cached_property
    def _turns_back(self) -> dict[int, tuple[int, int]]:
        """By part, the numbers of the first and the last run of its turn in the last backward."""
        found: dict[int, tuple[int, int]] = {}
        for at, ((phase, part, outside), _) in enumerate(self.runs[-1]):
            if phase is Phase.BACKWARD and not outside:
                found[part] = (found.get(part, (at, at))[0], at)
        return found

    def due(self, number: int) -> tuple[Phase, bool] | None:
        """When what a part's forward made is gone at the latest, in the last step: (FORWARD, False) when backward
        begins, (BACKWARD, False) when the part's own does, (BACKWARD, True) when that ends; None after that.
        """
        made, freed, back = self.made[number], self.freed.get(number), self._turns_back
        if freed is None or freed.step != made.step or made.part not in back:
            return None
        begin, end = back[made.part]
        if freed.run < min(first for first, _ in back.values()):
            return Phase.FORWARD, False
        return None if freed.run > end else (Phase.BACKWARD, freed.run >= begin)

    def sent(self, part: int, plain: Strand) -> list[tuple[Turn, int]]:
        """What the part sends away, with the turn of another one in which it is gone.

        That is what it made, and what others made that it freed in `plain` in its backward.
        """
        last, found = len(self.runs) - 1, []
        others = plain.frees(part)
        others.subtract(self.frees(part))
        for number, freed in sorted(self.freed.items()):
            made, turn = self.made.get(number), self.runs[freed.step][freed.run][0]
            if freed.step != last or made is None or made.step != last or made.phase is not Phase.FORWARD:
                continue
            if turn[0] is not Phase.FORWARD or turn[1] == OUTSIDE or turn[1] < part:
                continue
            kind = (made.part, self.records[number].nbytes)
            if made.part == part != freed.part:
                found.append((turn, number))
            elif made.part != part and others[kind] > 0:
                others[kind] -= 1
                found.append((turn, number))
        return found

    def frees(self, part: int) -> Counter[tuple[int, int]]:
        """How many of which size, made by which part in forward, its turn in the last backward frees."""
        return self._frees.get(part, Counter()).copy()

    @functools.cached_property
    def _frees(self) -> Mapping[int, Counter[tuple[int, int]]]:
        last = len(self.runs) - 1
        found: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        for number, freed in self.freed.items():
            made = self.made.get(number)
            if made is None or not made.step == freed.step == last or freed.part in (made.part, OUTSIDE):
                continue
            if made.phase is Phase.FORWARD and freed.phase is Phase.BACKWARD:
                found[freed.part][made.part, self.records[number].nbytes] += 1
        return found
