"""The assignment of candidates to parts in a trial step, such that no part is charged with another part's candidate.

"Row" is the number of a part, in the order of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memscale.planning.parts.candidates import Candidate
from memscale.transforms import offload

#: The techniques that move bytes.
MOVES = frozenset({"offload", "stream"})

#: By row: the family of the part in this row, and the candidate that the part tries.
Chosen = dict[int, tuple[object, Candidate]]

# Parts that together hold more tensors than the offload engine leaves on the device after forward. By choice.
_TAIL = 2
_MOVED = Candidate((("", offload()),))


def next_rows(families: Mapping[object, Sequence[int]], waiting: Mapping[object, list[Candidate]]) -> Chosen:
    """Returns the candidates for the next trial step, and removes them from `waiting`.

    Each row tries at most one candidate. Two rules keep the trials independent:

    - The part before an offloading part has no trial. Until the copy is done, the offloaded input counts to the part
      before, and a trial there would report bytes that its own candidate frees.
    - After the last offloading part, more parts offload, in trials whose results are discarded. The engine leaves the
      last tensors of forward on the device, since backward needs these tensors first.

    Args:
        families: the rows of alike parts by family, in the order of the step.
        waiting: the candidates without a trial, by family.
    """
    chosen: Chosen = {}
    for moves in (False, True):
        for family, candidates in waiting.items():
            wanted = [each for each in candidates if _moves(each) is moves]
            free = _free(families[family], chosen, moves)
            if moves and len(free) > len(wanted):  # leave rows for `_behind`
                free = free[: max(len(wanted), len(free) - _TAIL)]
            for row, candidate in zip(_spread(free, len(wanted)), wanted, strict=False):
                chosen[row] = (family, candidate)
    behind = _behind(families, chosen)
    for family, candidate in chosen.values():
        waiting[family].remove(candidate)
    return {**chosen, **behind}


def _behind(families: Mapping[object, Sequence[int]], chosen: Chosen) -> Chosen:
    """Returns offloads after the last offloading part; family None means: the result of the trial is discarded.

    Without free rows after that part, the last trials that offload are removed from `chosen`.
    """
    parts = sorted(row for family, rows in families.items() if family is not None for row in rows)
    while movers := sorted(row for row, (_, candidate) in chosen.items() if _moves(candidate)):
        free = [row for row in parts if row > movers[-1] and not {row, row - 1} & chosen.keys()]
        if len(free) >= _TAIL or len(chosen) == 1:
            return dict.fromkeys(free[-_TAIL:], (None, _MOVED))
        del chosen[movers[-1]]
    return {}


def _moves(candidate: Candidate) -> bool:
    return "offload" in candidate.techniques


def _free(rows: Sequence[int], chosen: Chosen, moves: bool) -> list[int]:
    """Returns the rows without a trial; if `moves`, only rows for which the row before is without a trial too."""
    free: list[int] = []
    for row in rows:
        if row not in chosen and not (moves and row - 1 in {*chosen, *free[-1:]}):
            free.append(row)
    return free


def _spread(rows: Sequence[int], wanted: int) -> Sequence[int]:
    """Returns at most `wanted` of the rows, spread evenly, with space at both ends."""
    if wanted >= len(rows):
        return rows
    return [rows[(2 * at + 1) * len(rows) // (2 * wanted)] for at in range(wanted)]
