"""Which part tries which candidate in a simulated step, so that none is charged with what another does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memscale.planning.parts.candidates import Candidate
from memscale.transforms import offload

#: The techniques that move bytes.
MOVES = frozenset({"offload", "stream"})

#: By row, what is tried there: the family of its part, and the candidate.
Chosen = dict[int, tuple[object, Candidate]]

# So many parts hold more tensors than an engine leaves where they are.
_TAIL = 2
_MOVED = Candidate((("", offload()),))


def next_rows(families: Mapping[object, Sequence[int]], waiting: Mapping[object, list[Candidate]]) -> Chosen:
    """The next candidates to be tried at once, which are taken from `waiting`.

    As many as there are rows, but none that moves activations behind another one: until its copy is through, what it
    moves of its input counts to the part before, and that one would seem to keep what it frees. And of what is moved
    the last stays where it is, since it is the first to be needed again: behind those that are tried one more moves.

    Args:
        families: the rows of the parts that are alike, in the order of the step.
        waiting: what each family has still to try.
    """
    chosen: Chosen = {}
    for moves in (False, True):
        for family, candidates in waiting.items():
            wanted = [each for each in candidates if _moves(each) is moves]
            free = _free(families[family], chosen, moves)
            if moves and len(free) > len(wanted):  # leave room behind
                free = free[: max(len(wanted), len(free) - _TAIL)]
            for row, candidate in zip(_spread(free, len(wanted)), wanted, strict=False):
                chosen[row] = (family, candidate)
    behind = _behind(families, chosen)
    for family, candidate in chosen.values():
        waiting[family].remove(candidate)
    return {**chosen, **behind}


def _behind(families: Mapping[object, Sequence[int]], chosen: Chosen) -> Chosen:
    """What moves behind all that is to be seen moving, which nobody looks up; the last of `chosen` make room for it."""
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
    """Those of the rows that have nothing to try; and for what moves activations, no part before them that has."""
    free: list[int] = []
    for row in rows:
        if row not in chosen and not (moves and row - 1 in {*chosen, *free[-1:]}):
            free.append(row)
    return free


def _spread(rows: Sequence[int], wanted: int) -> Sequence[int]:
    """At most `wanted` of the rows, as far from each other and from the ends as can be."""
    if wanted >= len(rows):
        return rows
    return [rows[(2 * at + 1) * len(rows) // (2 * wanted)] for at in range(wanted)]
