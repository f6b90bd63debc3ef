"""`LocalSearch`: rounds the solution of a relaxed program, and swaps candidates while that makes the step faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memscale.planning.parts.candidates import Candidate
from memscale.planning.solving.program import INTEGRAL, Floats
from memscale.planning.trials.costs import Assignment

# Swaps per part, after which rounding gives up: by choice, so that it ends. A swap that begins or ends streaming may
# leave more excess, and another may undo it.
_MOST_SWAPS = 4
# Share of the excess: a swap that lowers the excess by less changes only the last digits of a sum. Source: float64 has
# 15 digits, of which sums over thousands of parts lose a few.
_LEAST_LESS = 1e-6


@dataclass(frozen=True)
class LocalSearch:
    """A local search over assignments, by the bytes and seconds of the candidates.

    "[candidate]" is an axis over the candidates of all parts, one part after the other.

    Attributes:
        menus: [part] the candidates of the part.
        families: the parts to decide about, grouped by alike parts; every other part has a single allowed candidate.
        offsets: [part] the position of the part's first candidate on the axis [candidate].
        seconds: [candidate] seconds that the candidate adds to the step.
        held: [candidate, interval] bytes that the candidate holds, in MiB.
        together: [interval] bytes that are freed once any part streams, in MiB.
        matter: the intervals at which some choice can have its peak.
        streams: [candidate] whether the candidate streams parameters.
        out_bytes: [candidate] bytes that the candidate moves off the device.
        cap_bytes: the most bytes that all parts together may move; None is no limit.
    """

    menus: Sequence[Sequence[Candidate]]
    families: Mapping[object, list[int]]
    offsets: list[int]
    seconds: Floats
    held: Floats
    together: Floats
    matter: list[int]
    streams: npt.NDArray[np.bool_]
    out_bytes: Floats
    cap_bytes: int | None

    def columns(self, assignment: Assignment) -> list[int]:
        """Returns the positions of the assignment's candidates on the axis [candidate]."""
        return [offset + number for offset, number in zip(self.offsets, assignment, strict=False)]

    def held_by(self, assignment: Assignment) -> Floats:
        """Returns [interval] the bytes that the assignment's candidates hold together, in MiB."""
        columns = self.columns(assignment)
        found: Floats = self.held[columns].sum(axis=0)
        return found - self.together if self.streams[columns].any() else found

    def rounded(self, values: Floats, limit: float, allowed: Floats) -> Assignment | None:
        """Returns an assignment within the limit near the solution of the relaxed program; None if rounding fails.

        The first choice rounds the shares of each family. While the choice exceeds the limit, the swap with the fewest
        seconds per byte of less excess is made. For many alike parts the result usually is within the gap that the
        integer program is asked for, in a hundredth of its time.

        Args:
            values: [candidate] the solution of the relaxed program.
            limit: bytes that each interval may hold, in MiB.
            allowed: [candidate] above 0 if the candidate may be chosen.
        """
        starts = np.array(self.offsets[:-1])
        chosen = starts.copy()
        for row in {*range(len(starts))} - {row for rows in self.families.values() for row in rows}:
            chosen[row] += int(allowed[self.offsets[row] : self.offsets[row + 1]].argmax())
        for rows in self.families.values():
            columns = np.array([starts[row] + np.arange(len(self.menus[row])) for row in rows])
            shares = values[columns] * allowed[columns]
            numbers = self._counted(shares.sum(axis=0), self.streams[columns[0]], len(rows))
            chosen[rows] += sorted(numbers, key=self._places(rows).__getitem__)
        part_of = np.repeat(np.arange(len(starts)), np.diff(self.offsets))
        held, together, seconds = self.held[:, self.matter], self.together[self.matter], self.seconds
        for _ in range(_MOST_SWAPS * len(chosen)):
            over = held[chosen].sum(axis=0) - limit - together * self.streams[chosen].any()
            excess = float(np.maximum(0.0, over).sum())
            if not excess:
                break
            now = chosen[part_of]
            less = excess - np.maximum(0.0, over + held - held[now]).sum(axis=1)
            may = (allowed > 0) & (less > _LEAST_LESS * excess)
            if (may & (self.streams == self.streams[now])).any():
                may &= self.streams == self.streams[now]
            if not may.any():
                return None
            slower = np.maximum(0.0, seconds - seconds[now])
            best = int(np.where(may, slower / np.where(may, less, 1.0), np.inf).argmin())
            chosen[part_of[best]] = best
        else:
            return None
        fits = self.cap_bytes is None or self.out_bytes[chosen].sum() <= self.cap_bytes
        return tuple((chosen - starts).tolist()) if fits else None

    @staticmethod
    def _counted(shares: Floats, streams: npt.NDArray[np.bool_], rows: int) -> list[int]:
        """Returns `rows` candidate numbers that round `shares` [candidate], by the largest remainder.

        The number of streaming parts is rounded first, since whether a part streams matters most.
        """
        streamed = round(float(shares[streams].sum()))
        numbers: list[int] = []
        for which, count in ((~streams, rows - streamed), (streams, streamed)):
            share = np.where(which, shares, -1.0)
            whole = np.floor(share + INTEGRAL).clip(0).astype(int)
            rest = np.argsort(whole - share, kind="stable")[: max(0, count - whole.sum())].tolist()
            numbers += [*np.repeat(np.arange(len(whole)), whole).tolist(), *rest][:count]
        return numbers

    def polished(self, assignment: Assignment, limit: float, allowed: Floats) -> Assignment:
        """Returns the assignment after swaps of one or two candidates, each of which makes the step faster.

        Arguments are as in `rounded`.
        """
        # Swaps are between candidates that move the same bytes, so that `together` and the cap stay fulfilled.
        limits = limit + self.together * self.streams[self.columns(assignment)].any()
        held, limits = self.held[:, self.matter], limits[self.matter]
        seconds, moves = self.seconds, self.out_bytes
        part_of = np.repeat(np.arange(len(assignment)), np.diff(self.offsets))
        chosen = np.array(self.columns(assignment))
        for _ in range(len(assignment)):
            now = chosen[part_of]  # [candidate] the chosen candidate of the same part
            free = limits - held[chosen].sum(axis=0)
            faster = seconds[now] - seconds  # [candidate] seconds that the swap to the candidate saves
            more = held - held[now]
            same = (moves == moves[now]) & (self.streams == self.streams[now]) & (allowed > 0)
            single = np.where(same & (more <= free).all(axis=1), faster, 0.0)
            best = single.max(initial=0.0)
            pair: tuple[int, ...] = (int(single.argmax()),)
            for one in np.flatnonzero(same & (faster > best)).tolist():
                fits = same & (part_of != part_of[one]) & (more + more[one] <= free).all(axis=1)
                gain = np.where(fits, faster + faster[one], 0.0)
                if gain.max() > best * (1 + 1e-9):
                    best = gain.max()
                    pair = (one, int(gain.argmax()))
            if best <= 1e-6 * seconds[chosen].sum():
                break
            for each in pair:
                chosen[part_of[each]] = each
        return tuple((chosen - np.array(self.offsets[:-1])).tolist())

    def in_order(self, assignment: Assignment, limit: float) -> Assignment:
        """Returns the assignment with the candidates of alike parts in a canonical order, if that order fits.

        Early parts are changed and late parts stream. Of many equally fast assignments the result is always the same.
        Late parts stream because their gradients come first: the host updates them during the backward of the others.
        """
        found = list(assignment)
        for rows in self.families.values():
            chosen = sorted((found[row] for row in rows), key=self._places(rows).__getitem__)
            for row, number in zip(rows, chosen, strict=True):
                found[row] = number
        return tuple(found) if (self.held_by(tuple(found)) <= limit).all() else assignment

    def _places(self, rows: list[int]) -> dict[int, tuple[bool, bool, int]]:
        """Returns the sort key of each candidate of alike parts: changed, unchanged, then streaming."""
        menu = self.menus[rows[0]]
        return {number: ("stream" in menu[number].techniques, number == 0, number) for number in range(len(menu))}


def intervals_that_matter(held: Floats, together: Floats) -> list[int]:
    """Returns the intervals at which some choice can have its peak, for `held` [candidate, interval].

    An interval is left out if another interval holds at least as much for every candidate, with `together` and without.
    """
    kept: list[int] = []
    columns = np.ascontiguousarray(held.T)
    for at in np.argsort(-columns.sum(axis=1), kind="stable").tolist():
        if not any((columns[other] >= columns[at]).all() and together[other] <= together[at] for other in kept):
            kept.append(at)
    return sorted(kept)
