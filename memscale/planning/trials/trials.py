"""`TrialSteps`: simulates steps in which many candidates are tried at once.

In a model of eighty alike blocks, twelve blocks try twelve candidates in one step. "Row" is the number of a part, in
the order of the step; the row after the last part is the rest of the model. A "family" is a group of alike parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from memscale.algebra import Transform, chain
from memscale.core import MemscaleError
from memscale.planning.parts.candidates import Candidate, Rules
from memscale.planning.parts.parts import Part
from memscale.planning.parts.short_stack import left_out
from memscale.planning.trials.trial_rows import MOVES, next_rows
from memscale.simulation import Attribution, Trace, attribute
from memscale.transforms import proven_rows, tile

# Relative tolerance of two sums of the same times in different orders. Source: float64 has 15 digits.
_SAME_TIME = 1e-9

#: Returns the trace of forward and backward with rules, of the model without the parts at the given paths.
Simulate = Callable[[Rules, frozenset[str]], Trace]


@dataclass(frozen=True, eq=False)
class Trial:
    """A trial of a candidate, by one part in a simulated step.

    Attributes:
        row: the part that tried the candidate.
        found: the attribution of the step's bytes and seconds to parts.
        tried: the candidates that all rows tried in the step.
        written: the attribution of the step as written.
    """

    row: int
    found: Attribution
    tried: Mapping[int, Candidate]
    written: Attribution


#: A transform that cuts rows, at a path relative to a part.
Cutting = tuple[str, Transform]
_T = TypeVar("_T")

#: Trials by family and candidate.
Trials = dict[tuple[object, Candidate], Trial]

_HEAD_CUT = tile(chunks=2)  # the cut of a loss head along dimension 0. Source: the form that `_cuts` returns


class TrialSteps:
    """The trial steps of all candidates in `menus`.

    The number of steps is about the largest number of candidates per part in any family.

    Args:
        base: the attribution of the step as written.
        parts: the parts of the model.
        menus: the candidates of each part, and last of the rest of the model.
        simulate: returns the trace of a trial step.
    """

    def __init__(
        self, base: Attribution, parts: tuple[Part, ...], menus: Sequence[tuple[Candidate, ...]], simulate: Simulate
    ) -> None:
        self.base = base
        self.parts = parts
        self.paths = [part.path for part in parts]
        self.menus = menus
        self.simulate = simulate
        self.families: dict[object, list[int]] = {}
        for row, part in enumerate(parts):
            self.families.setdefault(part.alike, []).append(row)
        self.families[None] = [len(parts)]
        self._representative: frozenset[int] | None = None  # rows that run in the short stack as in the whole model

    def _path(self, row: int) -> str:
        """Returns the path of the part in this row, the root of its candidates' paths; "" for the rest of the model."""
        return self.paths[row] if row < len(self.paths) else ""

    def run(self, done: Trials, most: int) -> dict[Candidate, str]:
        """Adds the trial of each candidate to `done`; returns the candidates without a trial, with the reasons.

        Args:
            done: the trials so far; only candidates without a trial are tried.
            most: the largest number of rounds of trial steps; later candidates stay without a trial.
        """
        waiting = {
            family: [each for each in self.menus[rows[0]][1:] if (family, each) not in done]
            for family, rows in self.families.items()
        }
        rejected = self._keep_proven(waiting, done)
        for _ in range(most):
            if not any(waiting.values()):
                break
            self._try(next_rows(self.families, waiting), done, rejected)
        left = {each: "not tried: a step of so many operators takes long" for row in waiting.values() for each in row}
        return {**rejected, **left}

    def _keep_proven(self, waiting: Mapping[object, list[Candidate]], done: Trials) -> dict[Candidate, str]:
        """Removes candidates that cut rows without a proof of independent rows; returns these with reasons."""
        unproven: dict[tuple[object, Cutting], str] = {}
        proven = {(family, cut) for family, candidate in done for cut in _cuts(candidate)}
        cuts = {
            family: [
                cut
                for cut in dict.fromkeys(cut for each in candidates for cut in _cuts(each))
                # A loss head is a projection: its cut along dimension 0 needs no proof.
                if (family, cut) not in proven and (family is not None or cut[1] != _HEAD_CUT)
            ]
            for family, candidates in waiting.items()
        }
        gone = left_out(self.parts, self.families)
        while any(cuts.values()):
            chosen: dict[int, tuple[object, Cutting]] = {}
            for family, wanted in cuts.items():
                rows = [row for row in self.families[family] if self._path(row) not in gone]
                for row, cut in zip(rows, wanted, strict=False):
                    chosen[row] = (family, cut)
                del wanted[: len(rows)]
            self._prove(chosen, gone, unproven)
        rejected: dict[Candidate, str] = {}
        for family, candidates in waiting.items():
            for each in list(candidates):
                reasons = [unproven[family, cut] for cut in _cuts(each) if (family, cut) in unproven]
                if reasons:
                    rejected[each] = reasons[0]
                    candidates.remove(each)
        return rejected

    def _prove(
        self,
        chosen: Mapping[int, tuple[object, Cutting]],
        gone: frozenset[str],
        unproven: dict[tuple[object, Cutting], str],
    ) -> None:
        cuts = sorted((row, Candidate((cut,))) for row, (_, cut) in chosen.items())
        rules = tuple(rule for row, cut in cuts for rule in cut.at(self._path(row)))
        try:
            with proven_rows():
                self.simulate(rules, gone)
        except MemscaleError as error:
            if gone:  # the model's forward may need the removed blocks: prove in the whole model
                self._prove(chosen, frozenset(), unproven)
            elif len(chosen) == 1:
                (key,) = chosen.values()
                unproven[key] = _reason(error)
            else:
                for half in _halves(chosen):
                    self._prove(half, gone, unproven)

    def _try(
        self,
        chosen: Mapping[int, tuple[object, Candidate]],
        done: Trials,
        rejected: dict[Candidate, str],
    ) -> None:
        rules = [rule for row, (_, candidate) in sorted(chosen.items()) for rule in candidate.at(self._path(row))]
        try:
            found = self._found(tuple(rules), chosen)
        except MemscaleError as error:  # a transform refuses its region, or the model's code fails under the transform
            if len(chosen) == 1:
                ((_, candidate),) = chosen.values()
                rejected[candidate] = _reason(error)
                return
            for half in _halves(chosen):
                self._try(half, done, rejected)
            return
        tried = {row: candidate for row, (_, candidate) in chosen.items()}
        shown = attribute(found, self.paths)
        for row, key in chosen.items():
            done[key] = Trial(row, shown, tried, self.base)

    def _found(self, rules: Rules, chosen: Mapping[int, tuple[object, Candidate]]) -> Trace:
        """Returns the trace of the step with `rules`.

        Most of the repeated blocks are left out of the step on three conditions: no repeated block tries a candidate,
        no candidate moves bytes, and the parts that try candidates have the bytes and seconds of the whole model's
        step.
        """
        gone = left_out(self.parts, self.families)
        single = {row for rows in self.families.values() if gone.isdisjoint(map(self._path, rows)) for row in rows}
        moves = any(candidate.techniques & MOVES for _, candidate in chosen.values())
        if gone and chosen.keys() <= single and not moves:
            with contextlib.suppress(MemscaleError):  # the model's forward may need the removed blocks
                if self._representative is None:
                    self._representative = frozenset()
                    found = attribute(self.simulate((), gone), self.paths)
                    self._representative = frozenset(row for row in single if self._is_alike(found, row))
                if chosen.keys() <= self._representative:
                    return self.simulate(rules, gone)
        return self.simulate(rules, frozenset())

    def _is_alike(self, found: Attribution, part: int) -> bool:
        """Returns whether a part has the same bytes (at the intervals of `found`) and seconds as in the whole step."""
        base, columns = self.base, {interval: at for at, interval in enumerate(self.base.intervals)}
        # A trial step runs without the update, and so without optimizer states.
        held = [base.held_bytes[part, columns[interval]] - base.states_bytes[part] for interval in found.intervals]
        forward_backward = slice(0, 2)
        return (found.held_bytes[part] - found.states_bytes[part]).tolist() == held and np.allclose(
            found.seconds[part, forward_backward], base.seconds[part, forward_backward], rtol=_SAME_TIME, atol=0
        )


def _cuts(candidate: Candidate) -> list[Cutting]:
    """Returns the row cuts of a candidate: the path relative to the part, and the dimensions, for any chunk size."""
    return [
        (inside, tile(chunks=2, **{name: getattr(each, name) for name in ("dim", "in_dims", "out_dims")}))
        for inside, how in candidate.rules
        for each in chain(how)
        if each.spelling == "tile"
    ]


def _reason(error: MemscaleError) -> str:
    return (str(error).splitlines() or [""])[0]


def _halves(chosen: Mapping[int, _T]) -> list[dict[int, _T]]:
    rows = sorted(chosen)
    return [{row: chosen[row] for row in half} for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :])]
