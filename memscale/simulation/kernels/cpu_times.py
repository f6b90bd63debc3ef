"""How long this machine's kernels take: each is run on what it gets in the step, and timed.

A kernel's time depends on where its operands are. The same call on the same tensors, again and again, finds them in the
processor's caches; in a step they were last used some megabytes ago, or a whole forward. So a call is timed twice: with
operands that are cached, and after enough other memory has been used that they are not.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from memscale.core import available_host_bytes
from memscale.hardware import Seconds, Work
from memscale.simulation.kernels.caches import Clock, cpu_clock, own_caches
from memscale.simulation.kernels.kernel_cache import KernelCache
from memscale.simulation.kernels.shapes import exchanged, tensors_in
from memscale.simulation.process.draws import drawing_from

# All calls of one profile together, on the clock that times them, after which the others are estimated from those.
_BUDGET_SECONDS = 30.0
_CALL_SECONDS = 0.03  # that a kernel is repeated for, but three times at least
_FEW_CALLS, _MOST_CALLS = 3, 200
_COLD_CALLS = 3
# A kernel as long as this is timed anew when the step comes to it again, so that one slow moment of the machine is not
# all that is known of the few kernels that make a step: the median of so many times counts.
_LONG_SECONDS, _ROUNDS = 0.004, 5
# What is smaller costs its dispatch, wherever its operands are.
_SMALLEST_COLD_BYTES = 1 << 16
# What a smaller share of the operands takes longer tells little of what all would.
_LEAST_LOST = 0.25
_POOL = 1 << 16
_FEW_FAULTS = 8  # of the interpreter and the allocator
# They talk to other processes, or to a profiler.
_NOT_RUN = ("c10d", "_c10d_functional", "c10d_functional", "profiler")

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]


class CpuTimes:
    """The times of this machine's kernels, remembered on disk.

    Args:
        budget_seconds: for all calls together. Once it is spent, a kernel's time follows from the call of the same
            operator that is nearest in size, or from the traffic of all calls that were timed.
    """

    def __init__(self, *, budget_seconds: float = _BUDGET_SECONDS) -> None:
        self._cache: KernelCache[Seconds] = KernelCache("seconds", lambda both: Seconds(*both), tuple)
        self._left_seconds = budget_seconds
        self._known: dict[OpOverload, list[tuple[int, Seconds]]] = {}
        self._moved_bytes, self._moving_seconds = 0, 0.0
        self._timer = CallTimer()
        self._rounds: dict[str, list[Seconds]] = {}
        self.estimated: dict[str, None] = {}  # operators with a call that was not timed

    def get(self, op: OpOverload, args: Any, kwargs: Any, work: Work) -> Seconds | None:
        """The time of ``op(*args, **kwargs)``, of which only the layouts count; None where nothing is known of it."""
        if op.namespace in _NOT_RUN:
            return None
        size = work.flops or work.nbytes

        def again(key: str, known: Seconds) -> Seconds:
            rounds = self._rounds.setdefault(key, [known])
            if known.cached < _LONG_SECONDS or len(rounds) == _ROUNDS or self._left_seconds <= 0:
                return known
            with contextlib.suppress(_NotTimed):
                rounds.append(self._time(op, args, kwargs))
            return Seconds(*map(statistics.median_low, zip(*rounds, strict=True)))

        with contextlib.suppress(_NotTimed):
            found = self._cache.get(op, args, kwargs, lambda: self._time(op, args, kwargs), again)
            self._known.setdefault(op, []).append((size, found))
            self._moved_bytes += work.nbytes
            self._moving_seconds += found.uncached
            return found
        self.estimated[op.name()] = None
        if op in self._known:
            near, seconds = min(self._known[op], key=lambda known: abs(known[0] - size))
            return seconds.times(size / near if near else 1.0)
        if not self._moved_bytes:
            return None
        taken = self._moving_seconds * work.nbytes / self._moved_bytes
        return Seconds(taken, taken)

    def save(self) -> None:
        """Write down what was timed."""
        self._cache.save()

    def _time(self, op: OpOverload, args: Any, kwargs: Any) -> Seconds:
        if self._left_seconds <= 0:
            raise _NotTimed
        began = self._timer.now()
        try:
            return self._timer.seconds(op, args, kwargs)
        except Exception as error:  # it wants other values than these, or more memory than there is
            raise _NotTimed from error
        finally:
            self._left_seconds -= self._timer.now() - began


class _Call(NamedTuple):
    seconds: float
    page_faults: int


class CallTimer:
    """Times calls on tensors that are like those of the step, and its own.

    Args:
        clock: seconds since some moment.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.now = clock or cpu_clock()
        self._pool: dict[torch.dtype, torch.Tensor] = {}
        self._last: Any = None

    def seconds(self, op: OpOverload, args: Any, kwargs: Any) -> Seconds:
        """The time of a call with arguments like these.

        Raises:
            MemoryError: they do not fit into the memory that is free.
            Exception: whatever the kernel raises.
        """
        tensors = tensors_in(args, kwargs)
        nbytes = sum(map(_extent_bytes, tensors))
        free_bytes = available_host_bytes()
        if free_bytes is not None and 4 * nbytes > free_bytes:
            raise MemoryError(f"{nbytes} bytes for one call")
        own = {id(tensor): self._like(tensor) for tensor in tensors}
        args, kwargs = exchanged(tuple(args), own), exchanged(kwargs, own)
        run = _from_no_generator_of_others(op)
        self._once(run, args, kwargs)  # the first call of a kind loads code, and lets libraries prepare
        cached = uncached = self._cached(run, args, kwargs)
        if nbytes >= _SMALLEST_COLD_BYTES and (lost := own_caches().lost(nbytes, self._flush.nbytes + nbytes)):
            uncached += (self._uncached(run, args, kwargs) - cached) / max(lost, _LEAST_LOST)
        self._last = None
        return Seconds(cached, max(cached, uncached))

    @functools.cached_property
    def _flush(self) -> torch.Tensor:
        return own_caches().flush()

    def _cached(self, op: _Run, args: Any, kwargs: Any) -> float:
        taken: list[_Call] = []
        spent = 0.0
        while len(taken) < _FEW_CALLS or (spent < _CALL_SECONDS and len(taken) < _MOST_CALLS):
            taken.append(self._once(op, args, kwargs))
            spent += taken[-1].seconds
        return _usual(taken)

    def _uncached(self, op: _Run, args: Any, kwargs: Any) -> float:
        taken = []
        for _ in range(_COLD_CALLS):
            self._flush.sum()
            taken.append(self._once(op, args, kwargs))
        return _usual(taken)

    def _once(self, op: _Run, args: Any, kwargs: Any) -> _Call:
        faults = _page_faults()
        began = self.now()
        result = op(*args, **kwargs)
        taken = _Call(self.now() - began, _page_faults() - faults)
        # Kept until the next call is over, so that a call in two takes memory that was in use a moment ago. What lies
        # last on the heap goes back to the system when it is freed, and comes again a page at a time.
        self._last = result
        return taken

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same layout, of positive numbers: roots and logarithms of others take another path.

        Integers are the caller's own, which say where a kernel looks.
        """
        count = _extent_bytes(tensor) // tensor.itemsize
        if not tensor.is_floating_point():
            flat = tensor.as_strided((count,), (1,)).clone()
        else:
            flat = torch.empty(count, dtype=tensor.dtype, device="cpu")
            rows = count // _POOL
            pool = self._numbers(tensor.dtype)
            flat[: rows * _POOL].view(rows, _POOL).copy_(pool)
            flat[rows * _POOL :].copy_(pool[: count - rows * _POOL])
        return flat.as_strided(tensor.shape, tensor.stride(), 0)

    def _numbers(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._pool:
            generator = torch.Generator("cpu").manual_seed(0)
            numbers = torch.rand(_POOL, generator=generator, device="cpu", dtype=torch.float32)
            self._pool[dtype] = (numbers + 0.1).to(dtype)
        return self._pool[dtype]


def _usual(taken: list[_Call]) -> float:
    """The lower quartile: what disturbs a call only ever makes it longer.

    Of those with the fewest page faults. Results of more than 32 MiB have theirs in every call, in a step as well:
    glibc maps and unmaps them; smaller ones where the heap happens to end behind them.
    """
    fewest = min(call.page_faults for call in taken)
    seconds = sorted(call.seconds for call in taken if call.page_faults <= fewest + _FEW_FAULTS)
    return seconds[len(seconds) // 4]


def _page_faults() -> int:
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From the first number of `tensor` to its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


_Run = Callable[..., Any]


def _from_no_generator_of_others(op: OpOverload) -> _Run:
    """`op`, drawing from a generator of its own: a draw more would be another draw for all that follow."""
    drawing = drawing_from(op) if torch.Tag.nondeterministic_seeded in op.tags else None
    return op if drawing is None else partial(drawing, torch.Generator("cpu"))


class _NotTimed(Exception):
    """There is no time for this call, or it cannot be made."""
