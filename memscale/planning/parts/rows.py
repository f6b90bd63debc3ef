"""Where a row of layers is cut into stretches that are recomputed one by one: bytes against time.

A stretch keeps its input, and while backward is in it all that the stretch kept as it was. So for every place the step
as it is tells what cutting there costs, and a shortest path over the places finds the cuts of least time for a limit.
Which of them hold what they promise the simulation says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from memscale.planning.parts.blocks import could_be_block
from memscale.simulation import Phase, Trace, attribute, given_bytes
from memscale.transforms import Cut, layers

# So many limits between the least that cuts reach and what the row takes as it is.
_LIMITS = 10
# The least is looked for to this share of what the row takes: as many halvings as two to this power.
_HALVINGS = 7
# Of a row's forward: what a region takes by itself, so that of equal cuts the fewer are taken.
_OF_REGION = 1 / 1000
# Of more layers the way is long, and rows of as many blocks are cut every so many anyway: 320 took 30 s.
_MOST_LAYERS = 100
# At a place so many ways to come there, by what they keep.
_WAYS = 24


@dataclass(frozen=True)
class _Row:
    """A row of layers, from its step as it is.

    Attributes:
        cuts: before each layer the cut there, of the first none.
        places: the numbers of the layers before which it may be cut, the first and one behind the last with them.
        given: [layer] the bytes of its input.
        takes: [first layer, layer] what is held while backward is in a layer, if all before the first is gone.
        again: [layer] the seconds of its forward.
        ends: [layer] those that a stretch which ends with it need not run.
    """

    cuts: Sequence[Cut]
    places: Sequence[int]
    given: Sequence[int]
    takes: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    again: np.ndarray[tuple[int], np.dtype[np.float64]]
    ends: Sequence[float]

    def best(self, limit: float) -> tuple[Cut, ...] | None:
        """The cuts of least time with which it holds no more than `limit`; None if there are none."""
        count = len(self.cuts)
        ways: dict[int, list[tuple[int, float, tuple[Cut, ...]]]] = {0: [(0, 0.0, ())]}
        by_region = _OF_REGION * float(self.again.sum())
        least: tuple[float, tuple[Cut, ...]] | None = None
        for begin in self.places[:-1]:
            highest = np.maximum.accumulate(self.takes[begin])
            for kept, seconds, cuts in _fewest(ways.get(begin, [])):
                for end in self.places:
                    if end <= begin or kept + highest[end - 1] > limit:
                        continue
                    if end == count:
                        least = min(least or (seconds, cuts), (seconds, cuts), key=lambda way: way[0])
                        continue
                    taken = float(self.again[begin:end].sum()) - self.ends[end - 1] + by_region
                    ways.setdefault(end, []).append((kept + self.given[end], seconds + taken, (*cuts, self.cuts[end])))
        return least and least[1]


def cuts_of_row(module: nn.Module, path: str, step: Trace) -> Iterator[tuple[Cut, ...]]:
    """Cuts of the row that the module at `path` is, of less and less time for more and more bytes; none of another."""
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


def _fewest(ways: list[tuple[int, float, tuple[Cut, ...]]]) -> list[tuple[int, float, tuple[Cut, ...]]]:
    """Those that none is better than, in bytes and in seconds; of many some of each size."""
    found: list[tuple[int, float, tuple[Cut, ...]]] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not found or way[1] < found[-1][1]:
            found.append(way)
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
    if len(places) < 3 or len(set(paths)) < count:  # a layer that runs twice holds at once what is told of it
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
        # One operation with a weight keeps its input only.
        float(again[at]) if weighty[at] and not could_be_block(each) else 0.0
        for at, (_, each) in enumerate(found)
    ]
    return _Row([cut for cut, _ in found], places, given_bytes(step, paths), takes, again, ends)
