"""How much of what was used last a processor's caches still hold, of which data sheets say little.

The last level is shared with other cores, and on a rented machine with other tenants: a process may have a tenth of
what the system reports. So it is tried: what was just used is read once more, after more and more of other memory.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memscale.core import available_host_bytes
from memscale.simulation.kernels.kernel_cache import KernelCache

Clock = Callable[[], float]

_READ_BYTES = 1 << 20
_FEWEST_BYTES, _MOST_BYTES = 1 << 20, 512 << 20
_OF_FREE_BYTES = 8  # the part of them that trying may take
_TRIES = 5
# What leaves this share missing tells what all would take; to leave nothing takes several times as long.
_TELLING = 0.5


class Caches(NamedTuple):
    """What is missing of memory that was used a while ago.

    Attributes:
        nbytes: of other memory that was used since, rising.
        shares: [nbytes] of what a read out of no cache takes longer, how much it takes longer then: from 0 to 1.

    >>> caches = Caches((0, 100, 200), (0.0, 0.5, 1.0))
    >>> [caches.missing(nbytes) for nbytes in (0, 50, 150, 200, 1000)]
    [0.0, 0.25, 0.75, 1.0, 1.0]
    """

    nbytes: tuple[int, ...]
    shares: tuple[float, ...]

    def missing(self, nbytes: int) -> float:
        """The share after so much of other memory."""
        above = bisect_right(self.nbytes, nbytes)
        if above == len(self.nbytes):
            return self.shares[-1]
        (low, high), (before, after) = self.nbytes[above - 1 : above + 1], self.shares[above - 1 : above + 1]
        return before + (after - before) * (nbytes - low) / (high - low)

    def lost(self, total: int, since: int) -> float:
        """The share that is missing after `since` bytes, of what is not missing each time that `total` are used."""
        always = self.missing(total)
        return max(0.0, self.missing(since) - always) / (1.0 - always) if always < 1.0 else 0.0

    def flush(self) -> torch.Tensor:
        """Memory that, once it is read, leaves half in the caches of what was there, or less."""
        nbytes = next(nbytes for nbytes, share in zip(*self, strict=True) if share >= _TELLING)
        return torch.ones(nbytes // 4, device="cpu", dtype=torch.float32)


def cpu_clock() -> Clock:
    """One thread's own time, since what else runs on the machine must not count; several have no such clock."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def own_caches() -> Caches:
    """Those of this machine for this process, as found once and remembered on disk."""
    return _remembered(torch.get_num_threads())


@functools.cache
def _remembered(threads: int) -> Caches:
    known: KernelCache[Caches] = KernelCache("caches", _from_json, list)
    found = known.named("", lambda: tried(cpu_clock()))
    known.save()
    return found


def _from_json(both: Any) -> Caches:
    nbytes, shares = map(tuple, both)
    return Caches(nbytes, shares)


def tried(now: Clock) -> Caches:
    """What reads take after more and more of other memory.

    Args:
        now: seconds since some moment.
    """
    free_bytes = available_host_bytes()
    most = _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, free_bytes // _OF_FREE_BYTES)
    sizes = [0, _FEWEST_BYTES]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    others, read = (torch.ones(nbytes // 4, device="cpu", dtype=torch.float32) for nbytes in (sizes[-1], _READ_BYTES))

    def taken(size: int) -> float:
        found = []
        for _ in range(_TRIES):
            read.sum()
            others[: size // 4].sum()
            began = now()
            read.sum()
            found.append(now() - began)
        return statistics.median(found)

    seconds = list(itertools.accumulate(map(taken, sizes), max))
    longer = (seconds[-1] - seconds[0]) or 1.0
    return Caches(tuple(sizes), (*((each - seconds[0]) / longer for each in seconds[:-1]), 1.0))
