"""The share of recently used memory that the processor's caches still hold, measured on this machine.

Cores and tenants of a rented machine share the last-level cache, so a process may have a tenth of the size that the
system reports. The measurement reads a buffer again after reads of more and more other memory.
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
_OF_FREE_BYTES = 8  # the measurement takes at most 1/8 of the free host memory
_TRIES = 5
# `flush` evicts this share of a buffer; callers extrapolate, since evicting all takes several times as long.
_TELLING = 0.5


class Caches(NamedTuple):
    """The share of a buffer that is missing from the caches, as a function of other memory used since.

    Attributes:
        nbytes: the bytes of other memory used since the buffer was used, rising.
        shares: for each of `nbytes`, (seconds of a read - seconds of a cached read) / (seconds of an uncached read -
            seconds of a cached read), from 0 to 1.

    >>> caches = Caches((0, 100, 200), (0.0, 0.5, 1.0))
    >>> [caches.missing(nbytes) for nbytes in (0, 50, 150, 200, 1000)]
    [0.0, 0.25, 0.75, 1.0, 1.0]
    """

    nbytes: tuple[int, ...]
    shares: tuple[float, ...]

    def missing(self, nbytes: int) -> float:
        """Returns the missing share after `nbytes` of other memory, by linear interpolation."""
        above = bisect_right(self.nbytes, nbytes)
        if above == len(self.nbytes):
            return self.shares[-1]
        (low, high), (before, after) = self.nbytes[above - 1 : above + 1], self.shares[above - 1 : above + 1]
        return before + (after - before) * (nbytes - low) / (high - low)

    def lost(self, total: int, since: int) -> float:
        """Returns the share missing after `since` bytes, out of the share that a working set of `total` bytes keeps.

        The formula is (missing(since) - missing(total)) / (1 - missing(total)), at least 0.
        """
        always = self.missing(total)
        return max(0.0, self.missing(since) - always) / (1.0 - always) if always < 1.0 else 0.0

    def flush(self) -> torch.Tensor:
        """Returns a tensor whose read evicts at least half of a buffer from the caches."""
        nbytes = next(nbytes for nbytes, share in zip(*self, strict=True) if share >= _TELLING)
        return torch.ones(nbytes // 4, device="cpu", dtype=torch.float32)


def cpu_clock() -> Clock:
    """Returns a clock in seconds: this thread's CPU time with one thread of PyTorch, else wall time.

    CPU time leaves out other processes of the machine, but counts one thread only.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def own_caches() -> Caches:
    """Returns the caches of this machine, measured once for this number of threads and remembered on disk."""
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
    """Measures the caches: times reads of a buffer after reads of more and more other memory.

    Args:
        now: a clock in seconds.
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
