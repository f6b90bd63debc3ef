"""How much a processor's caches hold of what was used last, of which data sheets say little.

The last level is shared with other cores, and on a rented machine with other tenants: a process may have a tenth of
what the system reports. So it is tried: what was just used is read once more, after more and more of other memory.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from memscale.core import available_host_bytes
from memscale.simulation.kernels.kernel_cache import KernelCache

Clock = Callable[[], float]

_READ_BYTES = 1 << 20
_FEWEST_BYTES, _MOST_BYTES = 4 << 20, 512 << 20
_OF_FREE_BYTES = 8  # the part of them that trying may take
_TRIES = 5
# After so many times what they hold, nothing is left of what was there: they do not quite drop the oldest first.
_FLUSHED = 4


def cpu_clock() -> Clock:
    """One thread's own time, since what else runs on the machine must not count; several have no such clock."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def cache_bytes() -> int:
    """What the caches of this machine hold for this process, as found once and remembered on disk."""
    return _remembered(torch.get_num_threads())


@functools.cache
def _remembered(threads: int) -> int:
    known: KernelCache[int] = KernelCache("caches", int, int)
    found = known.named("bytes", lambda: tried_cache_bytes(cpu_clock()))
    known.save()
    return found


def tried_cache_bytes(now: Clock) -> int:
    """After how many bytes of other memory a read still takes less than midway between cached and not.

    Args:
        now: seconds since some moment.

    Returns:
        A power of two, from 4 MiB to 256 MiB.
    """
    free_bytes = available_host_bytes()
    most = _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, free_bytes // _OF_FREE_BYTES)
    sizes = [_FEWEST_BYTES]
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

    seconds = [taken(size) for size in sizes]
    midway = (seconds[0] + max(seconds)) / 2
    return max((size for size, each in zip(sizes[:-1], seconds, strict=False) if each < midway), default=sizes[0])


def flush() -> torch.Tensor:
    """Memory that, once it is read, leaves nothing in the caches of what was there."""
    return torch.ones(min(_FLUSHED * cache_bytes(), _MOST_BYTES) // 4, device="cpu", dtype=torch.float32)
