"""`LocalSearch`: rounds the solution of a relaxed program, and swaps one or two candidates while that is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memscale.planning.parts.candidates import Candidate
from memscale.planning.solving.program import Floats
from memscale.planning.trials.costs import Assignment

#: What is as good as 1 in the solution of a program.
INTEGRAL = 1 - 1e-6

# The most swaps for each part that make a rounded choice fit.
_MOST_SWAPS = 4


@dataclass(frozen=True)
class LocalSearch:
    """What candidates hold and take, one for each part to be chosen.

    Attributes:
        menus: by part.
        families: the parts that are alike, of those that are decided about: of others there is one candidate.
        offsets: by part, where its candidates begin among all.
        seconds: [candidate] what it adds to the step.
        held: [candidate, interval], in MiB.
        together: [interval] what of that is not there once any part streams, in MiB.
        streams: [candidate] whether it does.
        out_bytes: [candidate] what it moves off the device.
        cap_bytes: the most that all may; None is no limit.
    """

    menus: Sequence[Sequence[Candidate]]
    families: Mapping[object, list[int]]
    offsets: list[int]
    seconds: Floats
    held: Floats
    together: Floats
    streams: npt.NDArray[np.bool_]
    out_bytes: Floats
    cap_bytes: int | None

    def columns(self, assignment: Assignment) -> list[int]:
        """Where its candidates are among all."""
        return [offset + number for offset, number in zip(self.offsets, assignment, strict=False)]

    def held_by(self, assignment: Assignment) -> Floats:
        """[interval] what its candidates hold together."""
        columns = self.columns(assignment)
        found: Floats = self.held[columns].sum(axis=0)
        return found - self.together if self.streams[columns].any() else found

    def rounded(self, values: Floats, limit: float, allowed: Floats) -> Assignment | None:
        """What the relaxed program chooses most of, exchanged one by one for what holds less until it fits; None if
        that leads nowhere.

        Of many parts it is as near to the best as the program of whole numbers is asked to come, which takes up to 4 s
        for a Llama of 32 blocks where this takes 0.02 s.
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
        matter = _intervals_that_matter(self.held, self.together)
        held, together, seconds = self.held[:, matter], self.together[matter], self.seconds
        for _ in range(_MOST_SWAPS * len(chosen)):
            over = held[chosen].sum(axis=0) - limit - together * self.streams[chosen].any()
            excess = float(np.maximum(0.0, over).sum())
            if not excess:
                break
            now = chosen[part_of]
            less = excess - np.maximum(0.0, over + held - held[now]).sum(axis=1)
            may = (allowed > 0) & (less > 0)
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
        """So many candidates as there are rows, by their shares [candidate] of them: as many stream as is nearest."""
        streamed = round(float(shares[streams].sum()))
        numbers: list[int] = []
        for which, count in ((~streams, rows - streamed), (streams, streamed)):
            share = np.where(which, shares, -1.0)
            whole = np.floor(share + (1 - INTEGRAL)).clip(0).astype(int)
            rest = np.argsort(whole - share, kind="stable")[: max(0, count - whole.sum())].tolist()
            numbers += [*np.repeat(np.arange(len(whole)), whole).tolist(), *rest][:count]
        return numbers

    def polished(self, assignment: Assignment, limit: float, allowed: Floats) -> Assignment:
        """The assignment after swaps of one or two candidates, as long as one makes it faster."""
        # Whether any part streams stays as it is: no two are exchanged that do not move the same.
        limits = limit + self.together * self.streams[self.columns(assignment)].any()
        matter = _intervals_that_matter(self.held, self.together)
        held, limits = self.held[:, matter], limits[matter]
        seconds, moves = self.seconds, self.out_bytes
        part_of = np.repeat(np.arange(len(assignment)), np.diff(self.offsets))
        chosen = np.array(self.columns(assignment))
        for _ in range(len(assignment)):
            now = chosen[part_of]  # of each candidate, the one in whose place it would be
            free = limits - held[chosen].sum(axis=0)
            faster = seconds[now] - seconds  # by how much each exchange is
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
        """The assignment in which, of parts that are alike, the early ones change and the late ones stream, where that
        fits as well: of many that are as fast always the same one.

        Gradients of late parts are there first, and what is on the host is updated behind the backward of the others.
        """
        found = list(assignment)
        for rows in self.families.values():
            chosen = sorted((found[row] for row in rows), key=self._places(rows).__getitem__)
            for row, number in zip(rows, chosen, strict=True):
                found[row] = number
        return tuple(found) if (self.held_by(tuple(found)) <= limit).all() else assignment

    def _places(self, rows: list[int]) -> dict[int, tuple[bool, bool, int]]:
        """By candidate of parts that are alike, where in their row it stands."""
        menu = self.menus[rows[0]]
        return {number: ("stream" in menu[number].techniques, number == 0, number) for number in range(len(menu))}


def _intervals_that_matter(held: Floats, together: Floats) -> list[int]:
    """The intervals, of [candidate, interval], where some choice can hold most: what another one covers is left out,
    also by what it holds without what is there only together."""
    kept: list[int] = []
    columns = held.T
    for at in np.argsort(-columns.sum(axis=1), kind="stable").tolist():
        if not any((columns[other] >= columns[at]).all() and together[other] <= together[at] for other in kept):
            kept.append(at)
    return sorted(kept)
