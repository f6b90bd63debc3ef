"""The events of a step that was not simulated, from steps in which each of its parts was.

What a caching allocator holds of the device depends on the order of sizes, and no sum of parts tells. But what a part
allocates and frees while its turn is, in which order, hardly depends on the others: a step in which block 3 does what
block 5 did in another one has the events of the first, with those of block 5 in the place of block 3's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from memscale.simulation.attribution import OUTSIDE
from memscale.simulation.ledger import Ledger, Phase, StorageRecord
from memscale.simulation.strands import TRIM, UPDATE, Strand, Turn


class Given(NamedTuple):
    """What a part does in a step that is put together: as the part `donor` did in `strand`.

    `moves`: whether that sends something away.
    """

    strand: Strand
    donor: int
    moves: bool = False


def spliced(base: Strand, given: Mapping[int, Given], outside: Strand | None, plain: Strand) -> Ledger:
    """The births and deaths of the first and of the last step of `base` with other parts in it.

    Args:
        base: the step as it was simulated, with its update.
        given: by part, what it does that it does not do in `base`.
        outside: where what is outside of the parts is taken from; None is `base`.
        plain: the step in which no part has a rule, with its update.
    """
    return _Splice(base, given, outside, plain).run()


#: A storage of a strand, in the place of which part; None for what is not given to one.
_Name = tuple[int, int | None, int]


class _Splice:
    """One step as it is put together."""

    def __init__(self, base: Strand, given: Mapping[int, Given], outside: Strand | None, plain: Strand) -> None:
        self.base, self.given, self.outside, self.plain = base, given, outside, plain
        self.ledger = Ledger()
        self.numbers: dict[_Name, int] = {}
        self.live: set[int] = set()
        self.gradients: dict[str, int] = {}
        self.strands: dict[int, Strand] = {}  # of each gradient
        # Those that may be freed by whoever comes, by phase and size: who made them is not who frees them.
        self.open: dict[tuple[Phase, int], list[int]] = defaultdict(list)
        self.makers: dict[int, int] = {}
        self.due: dict[tuple[tuple[Phase, bool] | None, int], list[int]] = defaultdict(list)
        self.ahead: dict[Turn, list[tuple[Given, int, int]]] = defaultdict(list)
        self.sent: dict[Turn, list[tuple[Given, int, int]]] = defaultdict(list)
        for part, each in given.items():
            for turn, number in each.strand.ahead.get(each.donor, ()):
                self.ahead[_moved(turn, part - each.donor)].append((each, part, number))
            for turn, number in each.strand.sent(each.donor, plain) if each.moves else ():
                self.sent[_moved(turn, part - each.donor)].append((each, part, number))

    def run(self) -> Ledger:
        self._residents()
        for step in (0, -1):
            self.ledger.begin_step()
            runs = self.base.runs[step]
            last = {turn: at for at, (turn, _) in enumerate(runs)}
            seen: Counter[Turn] = Counter()
            in_backward = False
            for at, (turn, run) in enumerate(runs):
                phase, part, outside = turn
                if phase is not Phase.OPTIMIZER and not outside and in_backward is not (phase is Phase.BACKWARD):
                    in_backward = not in_backward
                    for key in [each for each in self.due if each[0] == (Phase.FORWARD, False)]:
                        self._settle(key)
                if phase is Phase.BACKWARD and not outside:
                    self._settle(((Phase.BACKWARD, False), part))
                if not seen[turn]:
                    for each, target, number in self.ahead.get(turn, ()):
                        self._make((id(each.strand), target, number), each.strand.records[number])
                if turn == UPDATE and step == 0 and not seen[turn]:
                    self._update(begins=True)
                self._turn(turn, run, seen[turn], at == last[turn])
                seen[turn] += 1
                if at == last[turn]:
                    if phase is Phase.BACKWARD and not outside:
                        self._settle(((Phase.BACKWARD, True), part))
                    if turn == UPDATE:
                        self._update(begins=False)
                    self._send(turn)
            for number in sorted(self.live & {each for row in self.open.values() for each in row}):
                self._free(number)  # nobody did
            while step == 0 and self.gradients:
                # Where nothing steps the first step drops its gradients, and a trial's last one leaves them.
                self._free(self.gradients.popitem()[1])
            self.open.clear()
            self.due.clear()
        return self.ledger

    def _residents(self) -> None:
        """What is there before the step."""
        replaced = [
            (self.base, None, None),
            *((each.strand, each.donor, part) for part, each in sorted(self.given.items())),
        ]
        for strand, donor, part in replaced:
            for event in strand.before:
                number = abs(event) - 1
                is_parameter = strand.records[number].category == "parameter"
                if (
                    is_parameter and strand.owner(number) in self.given
                    if donor is None
                    else not (is_parameter and strand.owner(number) == donor)
                ):
                    continue
                name = (id(strand), part, number)
                if event > 0:
                    self._make(name, strand.records[number])
                else:
                    self._free(self.numbers[name])

    def _update(self, *, begins: bool) -> None:
        """What the update does with parts whose parameters are away in the base, and here are not."""
        back = [part for part in sorted(self.given) if self.base.is_away(part) and not self._is_given_away(part)]
        if begins:
            for part in back:
                for number, record in enumerate(self.plain.records):
                    is_state = record.category == "optimizer state" and self.plain.stays(number)
                    if is_state and self.plain.owner(number) == part:
                        self._make((id(self.plain), part, number), record)
        else:
            for path in [path for path in self.gradients if self.base.owner_of(path) in back]:
                self._free(self.gradients.pop(path))

    def _turn(self, turn: Turn, run: list[int], time: int, is_last: bool) -> None:
        """One run of the base, or what is there in its place."""
        _, part, outside = turn
        source = self.given.get(part) if not outside else None
        strand = source.strand if source is not None else self.outside
        if turn == UPDATE or strand is None or (not outside and source is None):
            self._events(self.base, run, None, 0)
            return
        donor = part if source is None else source.donor
        theirs = strand.last.get((turn[0], donor, outside), [])
        if outside and not theirs:
            self._events(self.base, run, None, 0)
            return
        for event in run:  # a library's own memory is made once, by whoever comes first
            if event > 0 and self.base.records[event - 1].category == "workspace" and self.base.stays(event - 1):
                self._make((id(self.base), None, event - 1), self.base.records[event - 1])
        for each in theirs[time:] if is_last else theirs[time : time + 1]:
            self._events(strand, each, None if outside else part, part - donor)

    def _events(self, strand: Strand, run: list[int], part: int | None, shift: int) -> None:
        """What a run of a strand does, in the place of `part` if it is not in its own."""
        foreign = strand is not self.base
        for event in run:
            if event == TRIM:
                self.ledger.trim()
                continue
            number = abs(event) - 1
            record = strand.records[number]
            if not record.nbytes:
                continue
            name = (id(strand), part, number)
            path = record.path
            if record.category == "gradient" and part is not None and shift:
                path = self.base.paths[part] + path.removeprefix(strand.paths[part - shift])
            if event > 0:
                if number in strand.not_its_own and foreign:
                    continue
                if foreign and record.category == "workspace" and strand.stays(number):
                    continue
                if record.category == "optimizer state" and self._is_given_away(strand.owner(number)):
                    continue
                if record.category == "gradient" and self._is_added_to(path, strand):
                    continue
                made = self._make(name, record)
                if record.category == "gradient":
                    self.gradients[path], self.strands[made] = made, strand
                elif record.category != "optimizer state" and strand.leaves(number):
                    place = strand.made[number]
                    self.open[place.phase, record.nbytes].append(made)
                    self.makers[made] = OUTSIDE if part is None and place.part == OUTSIDE else place.part + shift
                    if place.part != OUTSIDE and place.phase is Phase.FORWARD:
                        self.due[strand.due(number), place.part + shift].append(made)
                continue
            if record.category == "gradient":
                found = self.gradients.pop(path, None)
            else:
                found = self.numbers.get(name)
                if found not in self.live:
                    found = self._other(strand, number, shift)
            if found is not None:
                self._free(found)

    def _other(self, strand: Strand, number: int, shift: int) -> int | None:
        """What is here in the place of a storage that another part of a strand made."""
        made = strand.made.get(number)
        if made is None:
            return None
        rows = self.open[made.phase, strand.records[number].nbytes]
        rows[:] = [each for each in rows if each in self.live]
        maker = OUTSIDE if made.part == OUTSIDE else made.part + shift
        found = next((each for each in reversed(rows) if self.makers[each] == maker), rows[-1] if rows else None)
        if found is not None:
            rows.remove(found)
        return found

    def _is_added_to(self, path: str, strand: Strand) -> bool:
        """Whether the gradient of a weight that two parts share is there already, which the second adds its own to.

        Where one that makes its own was first in `strand`, the second made the sum.
        """
        there = self.gradients.get(path)
        return there in self.live and there is not None and self.strands[there] is not strand

    def _is_given_away(self, part: int) -> bool:
        return part in self.given and self.given[part].strand.is_away(self.given[part].donor)

    def _settle(self, key: tuple[tuple[Phase, bool] | None, int]) -> None:
        for number in self.due.pop(key, ()):
            if number in self.live:
                self._free(number)

    def _send(self, turn: Turn) -> None:
        """What moved away is gone."""
        for each, part, number in self.sent.get(turn, ()):
            found = self.numbers.get((id(each.strand), part, number))
            if found not in self.live:
                found = self._other(each.strand, number, part - each.donor)
            if found is not None:
                self._free(found)

    def _make(self, name: _Name, record: StorageRecord) -> int:
        self.numbers[name] = made = self.ledger.birth(record)
        self.live.add(made)
        return made

    def _free(self, number: int) -> None:
        self.live.discard(number)
        self.ledger.death(number)


def _moved(turn: Turn, by: int) -> Turn:
    phase, part, outside = turn
    return (phase, part if part == OUTSIDE else part + by, outside)
