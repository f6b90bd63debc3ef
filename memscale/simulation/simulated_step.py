"""The books of a simulated step, and what is asked of them: its profile, what its modules hold, what they run."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memscale.simulation.analysis import analyse
from memscale.simulation.attribution import OUTSIDE, Attribution, Owners, Shares, attribute, shares
from memscale.simulation.ledger import Ledger, Phase
from memscale.simulation.results import Profile
from memscale.simulation.sandbox.garbage import few_collections
from memscale.simulation.schedule.clock import Clock


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """The books of a simulated step, before anything is added up.

    Attributes:
        ledger: with `add_in_place` done.
        clock: when its operators and copies ran, and on what.
        notes: what the simulation assumed.
        by_tier: the most bytes that each tier below the device held.
        goes_by_draws: whether its code read a random number.
    """

    ledger: Ledger
    clock: Clock
    notes: tuple[str, ...]
    by_tier: Mapping[str, int]
    goes_by_draws: bool = False

    def profile(self, capacity_bytes: int | None = None, *, advises: bool = False) -> Profile:
        """What `memscale.profile` says of it, which `advises` about the allocator's settings besides."""
        with few_collections():
            return analyse(self.ledger, self.clock, self.notes, self.by_tier, capacity_bytes, advises=advises)

    @property
    def last_operators(self) -> int:
        """How many operators its last step has."""
        return len(self.ledger.ops) - self.ledger.steps[-1][1]

    def digest(self) -> str:
        """A hash of all that was simulated: two steps that share it hold the same, at the same moments, as long."""
        ledger, clock = self.ledger, self.clock
        found = hashlib.sha256()
        for op in ledger.ops:
            found.update(repr((op.name, op.path, op.phase.value, op.flops, op.nbytes, op.dtype, op.seconds)).encode())
        for each in ledger.records:
            about = (each.nbytes, each.op, each.category, each.shape, each.dtype, each.path, each.away)
            found.update(repr(about).encode())
        books = (
            ledger.events,
            ledger.event_ops,
            ledger.steps,
            ledger.trims,
            ledger.trims_if_grown,
            clock.steps,
            clock.begins,
            clock.ends,
        )
        found.update(repr((*books, clock.stalls, clock.end, self.notes, sorted(self.by_tier.items()))).encode())
        for copy in clock.transfers:
            found.update(repr((copy.begin, copy.end, copy.direction, copy.tier, copy.nbytes, copy.awaited)).encode())
        return found.hexdigest()

    def shares(self, paths: Sequence[str]) -> Shares:
        """What each of the modules at `paths` keeps for backward and takes of the time, without those inside it."""
        return shares(self.ledger, self.clock, paths)

    def operators(self, path: str) -> frozenset[str]:
        """The names of the operators that the forward of the module at `path` runs, with those inside it.

        Of the whole model those inside it alone: its own are not known from the loss's.
        """
        first_op = self.ledger.steps[-1][1]
        inside = f"{path}."
        return frozenset(
            op.name
            for op in self.ledger.ops[first_op:]
            if op.phase is Phase.FORWARD and (f"{op.path}.".startswith(inside) if path else op.path)
        )

    def runs(self, path: str) -> int:
        """How often the forward of the module at `path` runs: as often as the rarest operator in it."""
        inside = f"{path}."
        ops = self.ledger.ops[self.ledger.steps[-1][1] :]
        found = Counter(
            (op.path, op.name) for op in ops if op.phase is Phase.FORWARD and f"{op.path}.".startswith(inside)
        )
        return min(found.values(), default=0)

    def turns(self, path: str) -> int:
        """How often the forward of the module at `path` begins behind another's, as a cell in a loop does each time."""
        first_op = self.ledger.steps[-1][1]
        inside = path and f"{path}."
        within = [f"{op.path}.".startswith(inside) for op in self.ledger.ops[first_op:] if op.phase is Phase.FORWARD]
        return sum(now and not before for before, now in itertools.pairwise([False, *within]))

    def given_bytes(self, paths: Sequence[str]) -> list[int]:
        """The bytes that each of the modules at `paths`, which run one after the other, is given by those before it.

        That is the last that these made which is still there when the module begins; 0 if nothing is.
        """
        ledger, owners = self.ledger, Owners(paths)
        begin, first_op = ledger.steps[-1]
        firsts: dict[int, int] = {}
        for at, op in enumerate(ledger.ops[first_op:], first_op):
            if op.phase is Phase.FORWARD and (part := owners.of(op.path)) != OUTSIDE:
                firsts.setdefault(part, at)
        given = [0] * len(paths)
        waiting = sorted(((at, part) for part, at in firsts.items()), reverse=True)
        there: dict[int, None] = {}
        for event, now in zip(ledger.events[begin:], ledger.event_ops[begin:], strict=True):
            while waiting and now >= waiting[-1][0]:
                made = [ledger.records[number] for number in there]
                last = max((record.op for record in made), default=-1)
                # Beside its values an operator may give indices or statistics.
                given[waiting.pop()[1]] = max((record.nbytes for record in made if record.op == last), default=0)
            number = abs(event) - 1
            record = ledger.records[number]
            if event < 0:
                there.pop(number, None)
            elif "float" in record.dtype and owners.of(record.path) != OUTSIDE:
                there[number] = None
        return given

    def attribution(self, paths: Sequence[str]) -> Attribution:
        """What the modules at `paths`, none of which is inside another, hold of its last step, and when."""
        return attribute(self.ledger, self.clock, paths)
