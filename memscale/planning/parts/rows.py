"""Cuts a row of layers into segments that are recomputed one by one, by a trade of bytes against time.

A segment keeps its input; while backward is in the segment, the step holds all bytes that the segment keeps as written.
So the step as written has the bytes and seconds of every segment, and a shortest path over the cuts finds the cuts of
least time for a limit. The result is an estimate: a trial simulates the chosen cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from memscale.planning.parts.blocks import could_be_block
from memscale.simulation import Phase, Trace, attribute, given_bytes
from memscale.transforms import Cut, layers

# Limits between the fewest bytes that cuts reach and the bytes of the row as written; each gives a candidate:
# benchmarks/bench_plan.py --only convnet --peers.
_LIMITS = 10
# Bisections for the fewest bytes that cuts reach: the error is 2**-7 of the row's bytes: benchmarks/bench_plan.py
# --smallest.
_HALVINGS = 7
# Share of a row's forward: the seconds that each region adds, so that fewer of equally good cuts are taken;
# benchmarks/bench_checkpoint.py measures what a region adds.
_OF_REGION = 1 / 1000
# The most layers of a row: the search takes long for more, and longer rows still have cuts at every n-th block:
# benchmarks/bench_simulate.py --plan.
_MOST_LAYERS = 100
# Partial solutions that the search keeps for each place of a cut; more take longer: benchmarks/bench_plan.py --only
# convnet --peers.
_WAYS = 24


@dataclass(frozen=True)
class _Row:
    """A row of layers, with bytes and seconds from the step as written.

    Attributes:
        cuts: [layer] the cut before the layer.
        places: the numbers of the layers before which the row may be cut, with 0 and the number of layers.
        given: [layer] the bytes of the layer's input.
        takes: [first layer, layer] the bytes held while backward is in `layer`, if all layers before `first layer` keep
            nothing.
        again: [layer] the seconds of the layer's forward.
        ends: [layer] the seconds of forward that the recompute of a segment saves if the layer is the segment's last.
    """

    cuts: Sequence[Cut]
    places: Sequence[int]
    given: Sequence[int]
    takes: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    again: np.ndarray[tuple[int], np.dtype[np.float64]]
    ends: Sequence[float]

    def best(self, limit: float) -> tuple[Cut, ...] | None:
        """Returns the cuts of least time with which the row holds at most `limit` bytes; None if no cuts do."""
        count = len(self.cuts)
        front: dict[int, list[tuple[int, float, tuple[Cut, ...]]]] = {0: [(0, 0.0, ())]}
        by_region = _OF_REGION * float(self.again.sum())
        least: tuple[float, tuple[Cut, ...]] | None = None
        for begin in self.places[:-1]:
            highest = np.maximum.accumulate(self.takes[begin])
            for kept, seconds, cuts in _fewest(front.get(begin, [])):
                for end in self.places:
                    if end <= begin or kept + highest[end - 1] > limit:
                        continue
                    if end == count:
                        least = min(least or (seconds, cuts), (seconds, cuts), key=lambda partial: partial[0])
                        continue
                    taken = float(self.again[begin:end].sum()) - self.ends[end - 1] + by_region
                    front.setdefault(end, []).append((kept + self.given[end], seconds + taken, (*cuts, self.cuts[end])))
        return least and least[1]


def cuts_of_row(module: nn.Module, path: str, step: Trace) -> Iterator[tuple[Cut, ...]]:
    """Yields cuts of the row of layers at `path`, by falling seconds and growing bytes; nothing for other modules."""
    row = _row(module, path, step)
    if row is None:
        return
    most = float(row.takes[0].max())
    low, least = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + least) / 2
        if row.best(middle) is None:
            low = middle
        else:
            least = middle
    found = (row.best(least * (most / least) ** (at / _LIMITS)) for at in range(_LIMITS)) if least else ()
    yield from dict.fromkeys(cuts for cuts in found if cuts)


def _fewest(partials: list[tuple[int, float, tuple[Cut, ...]]]) -> list[tuple[int, float, tuple[Cut, ...]]]:
    """Returns the Pareto front of `partials` in bytes and seconds, thinned evenly to at most `_WAYS` entries."""
    found: list[tuple[int, float, tuple[Cut, ...]]] = []
    for partial in sorted(partials, key=lambda partial: partial[:2]):
        if not found or partial[1] < found[-1][1]:
            found.append(partial)
    return found if len(found) <= _WAYS else [found[at * (len(found) - 1) // (_WAYS - 1)] for at in range(_WAYS)]


def _row(module: nn.Module, path: str, step: Trace) -> _Row | None:
    found = layers(module)
    if len(found) > _MOST_LAYERS:
        return None
    names = {id(each): f"{path}.{name}".lstrip(".") for name, each in module.named_modules()}
    paths = [names[id(each)] for _, each in found]
    weighty = [any(one.ndim >= 2 for one in each.parameters()) for _, each in found]
    count = len(found)
    places = [0, *(at for at in range(1, count) if weighty[at - 1] or weighty[at]), count]
    if len(places) < 3 or len(set(paths)) < count:  # the bytes of a layer that runs twice cannot be told apart
        return None
    seen = attribute(step, paths)
    columns = {
        each.part: at for at, each in enumerate(seen.intervals) if each.phase is Phase.BACKWARD and not each.outside
    }
    held = seen.held_bytes - (seen.parameters_bytes + seen.states_bytes)[:, None]
    takes = np.zeros((count, count), dtype=np.int64)
    for layer, column in columns.items():
        if not 0 <= layer < count:
            continue
        for begin in range(layer + 1):
            gone = held[:begin, column].sum() + sum(
                theirs[column]
                for (holder, maker), theirs in seen.handed_bytes.items()
                if begin <= holder < count and 0 <= maker < begin
            )
            takes[begin, layer] = held[:count, column].sum() - gone
    again = seen.seconds[:count, 0]
    ends = [
        # A single operation with a weight keeps its input only: the recompute need not run the operation.
        float(again[at]) if weighty[at] and not could_be_block(each) else 0.0
        for at, (_, each) in enumerate(found)
    ]
    return _Row([cut for cut, _ in found], places, given_bytes(step, paths), takes, again, ends)
