"""Times of this machine's CPU kernels: each kernel runs on operands with the layouts of the step, and is timed.

NOTE: a kernel's time depends on whether the processor's caches hold its operands. A repeated call finds its operands
cached; in a step, megabytes of other memory, or a whole forward, may lie between two uses. So each call is timed twice:
with cached operands, and after reads of enough other memory to evict them.
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

# Seconds for all timed calls of one profile; later calls are estimated from the timed ones.
_BUDGET_SECONDS = 30.0
_CALL_SECONDS = 0.03  # a kernel is repeated for this time, and at least `_FEW_CALLS` times
_FEW_CALLS, _MOST_CALLS = 3, 200
_COLD_CALLS = 3
# A kernel of at least `_LONG_SECONDS` is timed in up to `_ROUNDS` of its calls, and the median counts: a few long
# kernels make up most of a step, and one slow moment of the machine would distort a single measurement.
_LONG_SECONDS, _ROUNDS = 0.004, 5
# A call with fewer bytes is bound by its dispatch, cached or not.
_SMALLEST_COLD_BYTES = 1 << 16
# The lower bound of the evicted share by which the extra time is divided: a smaller share would amplify noise.
_LEAST_LOST = 0.25
_POOL = 1 << 16  # numbers in the pool that fills operands
_FEW_FAULTS = 8  # page faults that the interpreter and the allocator cause in any call
# Operators of these namespaces communicate with other processes, or with a profiler.
_NOT_RUN = ("c10d", "_c10d_functional", "c10d_functional", "profiler")

try:
    import resource
except ImportError:  # Windows lacks the module
    resource = None  # type: ignore[assignment]


class CpuTimes:
    """The times of this machine's kernels, remembered on disk.

    Args:
        budget_seconds: seconds for all timed calls together. After these, a kernel's time is scaled from the timed call
            of the same operator that is nearest in size, or else from the bytes per second of all timed calls.
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
        """Returns the seconds of ``op(*args, **kwargs)`` by its arguments' layouts; None if no call could be timed."""
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
        """Writes the times to disk."""
        self._cache.save()

    def _time(self, op: OpOverload, args: Any, kwargs: Any) -> Seconds:
        if self._left_seconds <= 0:
            raise _NotTimed
        began = self._timer.now()
        try:
            return self._timer.seconds(op, args, kwargs)
        except Exception as error:  # the kernel refuses the values of `_like`, or its operands exceed the free memory
            raise _NotTimed from error
        finally:
            self._left_seconds -= self._timer.now() - began


class _Call(NamedTuple):
    seconds: float
    page_faults: int


class CallTimer:
    """A timer of calls on its own tensors, which have the layouts of the step's tensors.

    Args:
        clock: a clock in seconds; None takes `cpu_clock`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.now = clock or cpu_clock()
        self._pool: dict[torch.dtype, torch.Tensor] = {}
        self._last: Any = None

    def seconds(self, op: OpOverload, args: Any, kwargs: Any) -> Seconds:
        """Returns the seconds of a call with arguments of these layouts, cached and uncached.

        Raises:
            MemoryError: the arguments take more than a quarter of the free host memory.
            Exception: the error that the kernel raises.
        """
        tensors = tensors_in(args, kwargs)
        nbytes = sum(map(_extent_bytes, tensors))
        free_bytes = available_host_bytes()
        if free_bytes is not None and 4 * nbytes > free_bytes:
            raise MemoryError(f"{nbytes} bytes for one call")
        own = {id(tensor): self._like(tensor) for tensor in tensors}
        args, kwargs = exchanged(tuple(args), own), exchanged(kwargs, own)
        run = _from_no_generator_of_others(op)
        self._once(run, args, kwargs)  # the first call loads code and initialises libraries
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
        # The result lives until the next call is over, so every other call reuses memory that is still mapped. A freed
        # block at the end of the heap would go back to the system, and page-fault at the next call.
        self._last = result
        return taken

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with the layout of `tensor`: positive floats, or a copy of `tensor`'s integers.

        Negative floats would take a slow path in roots and logarithms; integers are indices, which decide what a kernel
        reads.
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
    """Returns the lower quartile of the seconds of the calls with the fewest page faults.

    A disturbance only makes a call longer. glibc maps and unmaps a result above 32 MiB in every call, in a step too; a
    smaller result faults only where it happens to lie at the end of the heap.
    """
    fewest = min(call.page_faults for call in taken)
    seconds = sorted(call.seconds for call in taken if call.page_faults <= fewest + _FEW_FAULTS)
    return seconds[len(seconds) // 4]


def _page_faults() -> int:
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first element of `tensor` to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


_Run = Callable[..., Any]


def _from_no_generator_of_others(op: OpOverload) -> _Run:
    """Returns `op`, drawing from a new generator: one more draw would change every later draw of the process."""
    drawing = drawing_from(op) if torch.Tag.nondeterministic_seeded in op.tags else None
    return op if drawing is None else partial(drawing, torch.Generator("cpu"))


class _NotTimed(Exception):
    """Raised for a call that is over the budget of seconds, or that fails."""
