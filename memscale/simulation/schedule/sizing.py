"""The prefetch depth: the number of copies in flight, in each direction, that hides copies behind the compute."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from memscale.simulation.trace import Transfer

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# A depth is deep enough if no larger one saves this share of the step, beyond the copies that the larger depth only
# moves from the end of a pass into the next pass, which costs memory and hides nothing.
_WORTH = 0.01
_COPIES = 2


def prefetch_depth(
    seconds: Sequence[float], passes: Sequence[int], transfers: Sequence[Transfer], *, first: int
) -> int:
    """Returns the `AsyncOffloadConfig.prefetch_depth` that hides the copies of a step as far as possible.

    The function replays the step as queues for each depth: the compute waits while more than `depth` copies out are in
    flight, and each copy in starts `depth` requests ahead of its use. Requests at one moment count as one.

    seconds: [operator] the seconds of each operator.
        passes: [operator] the pass over the model that the operator belongs to; no copy is requested across passes.
        transfers: the copies of the step.
        first: the number of the step's first operator.
        first: the number of its first operator.
    """
    replay = DepthReplay(seconds, passes, transfers, first)
    took = {depth: replay.seconds(depth) for depth in _DEPTHS}
    copy_seconds = sum(transfer.end - transfer.begin for transfer in transfers) / len(transfers)

    def is_deep_enough(depth: int) -> bool:
        return all(
            took[depth] - took[deeper] <= max(_WORTH * took[depth], _COPIES * (deeper - depth) * copy_seconds)
            for deeper in _DEPTHS
            if deeper > depth
        )

    return next(filter(is_deep_enough, _DEPTHS))


class DepthReplay:
    """A step as queues, which `seconds` replays with a given depth; arguments as in `prefetch_depth`."""

    def __init__(
        self, seconds: Sequence[float], passes: Sequence[int], transfers: Sequence[Transfer], first: int
    ) -> None:
        self._before = [0.0, *itertools.accumulate(seconds)]
        last = len(seconds)
        requests: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.direction == "in" and transfer.awaited is not None:
                requests.setdefault(min(transfer.awaited - first, last), []).append(transfer)
        self._requests = sorted(requests.items())
        self._passes = [passes[min(op, last - 1)] for op, _ in self._requests]
        departures = [(max(0, each.requested - first), each) for each in transfers if each.direction == "out"]
        # At equal moments copies out come first, as in the engine's order of stash and fetch.
        self._moments: list[tuple[int, int, Transfer | None]] = sorted(
            [(op, -1, each) for op, each in departures]
            + [(op, number, None) for number, (op, _) in enumerate(self._requests)],
            key=lambda moment: moment[:2],
        )

    def seconds(self, depth: int) -> float:
        """Returns the seconds of the step with this depth."""
        ends = {"out": 0.0, "in": 0.0, "disk": 0.0}
        stood_still = 0.0
        leaving: deque[float] = deque()
        arrivals: list[float] = []
        for op, number, departure in self._moments:
            now = self._before[op] + stood_still
            if departure is not None:
                leaving.append(_copied(departure, now, ends))
                if len(leaving) > depth:
                    stood_still += max(0.0, leaving.popleft() - now)
                continue
            for ahead in range(len(arrivals), min(number + depth + 1, len(self._requests))):
                if self._passes[ahead] != self._passes[number]:
                    break
                arrivals.append(max([_copied(each, now, ends) for each in self._requests[ahead][1]]))
            stood_still += max(0.0, arrivals[number] - now)
        return self._before[-1] + stood_still


def _copied(transfer: Transfer, now: float, ends: dict[str, float]) -> float:
    """Returns the end of a copy that is requested now."""
    queues = [transfer.direction, "disk"] if transfer.tier == "disk" else [transfer.direction]
    end = max(now, *(ends[queue] for queue in queues)) + transfer.end - transfer.begin
    for queue in queues:
        ends[queue] = end
    return end
