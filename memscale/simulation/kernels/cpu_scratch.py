"""Scratch memory of CPU kernels, beyond their results: measured by running each kernel on a part of its batch.

NOTE: a convolution reorders its tensors into blocked layouts, which depend on the processor's instruction set, the
shape and the dtype, and which only oneDNN knows. So the kernel runs on zeros, once on as many samples as are cheap and
once on half as many. Each allocated size is affine in the number of samples (the peak, a maximum, is not), so the
sequence of sizes for the whole batch follows from the two runs. Operators that only move numbers do not run, nor do
calls that would take more than some tenths of a second; with `probe` every kernel runs, on its whole batch.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import hashlib
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from memscale.core import DiskCache, OpOverload, internals
from memscale.hardware import cpu_name
from memscale.simulation.kernels.shapes import (
    exchanged,
    signature,
    strided_parts,
    tensors_in,
    written_arguments,
    written_by,
)
from memscale.simulation.process.draws import with_own_draws
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.rules.registry import rule_of

aten = torch.ops.aten

# FLOPs of the largest call that is run: some tenths of a second on one core.
_LARGEST_PROBE_FLOPS = 1 << 33
_FLOPS_PER_BYTE = 16  # FLOPs that a core computes in the time of moving one byte

_ENOUGH_ROWS = 512
# Operators that only move numbers take no scratch memory. Every other operator is probed: about one in five of
# PyTorch's sample inputs takes scratch memory, and each release adds operators.
_MAKES = ("empty", "zeros", "ones", "full", "new_")
_LOOPS = ("_foreach_", "_fused_")  # an optimizer's loops over all parameters
_FACTORISES = ("linalg_", "_linalg_", "cholesky", "lu_", "geqrf", "ormqr")
# matrix_exp chooses the degree of its polynomial by the matrix's values, and zeros get the lowest degree. The highest
# degree holds 12 matrices for a single one, or 10 for each of a batch, besides the result, and 3 numbers each.
_EXPONENTIAL, _OF_ONE, _OF_SEVERAL, _NUMBERS = aten.linalg_matrix_exp.default, 12, 10, 3
_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


_profiler: Any = torch.autograd  # PyTorch's stubs do not know these functions
_RECORD_MEMORY = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
)


@dataclass(frozen=True)
class ScratchProbe:
    """The bytes that one call of a kernel allocated (positive) and freed (negative), in order, and returned.

    >>> few, more = ScratchProbe((30, 10, -30), 10), ScratchProbe((50, 20, -50), 20)
    >>> few.scratch_bytes, few.extended(more, 2.0)
    (30, ScratchProbe(changes=(90, 40, -90), returned_bytes=40))
    """

    changes: tuple[int, ...]
    returned_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """The most bytes that lived at once during the call, minus the returned bytes."""
        return max(0, max(accumulate(self.changes), default=0) - self.returned_bytes)

    def extended(self, more: ScratchProbe, steps: float) -> ScratchProbe:
        """Returns the linear extrapolation ``more + (more - self) * steps`` of each allocated size."""
        if len(self.changes) != len(more.changes):  # the two runs chose different algorithms: only sums are comparable
            returned = _further(self.returned_bytes, more.returned_bytes, steps)
            scratch = max(0, _further(self.scratch_bytes, more.scratch_bytes, steps))
            return ScratchProbe((returned + scratch, -scratch), returned)
        changes = [_further(before, after, steps) for before, after in zip(self.changes, more.changes, strict=True)]
        return ScratchProbe(tuple(changes), _further(self.returned_bytes, more.returned_bytes, steps))


def _further(before: int, after: int, steps: float) -> int:
    return after + round((after - before) * steps)


def this_machine() -> str:
    """Returns a hash of all that kernels depend on besides their arguments: processor, PyTorch, threads, switches."""
    about = (
        torch.__version__,
        platform.machine(),
        cpu_name(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


class CpuScratch:
    """The scratch memory of this machine's kernels, remembered on disk.

    Args:
        probe: run every kernel once on its whole batch.
    """

    def __init__(self, *, probe: bool) -> None:
        self._probe = probe
        self._name = f"probes-{this_machine()}"
        self._disk = DiskCache("kernels")
        self._changed = False

    def nbytes(self, op: OpOverload, args: Any, kwargs: Any, flops: int, *, by_values: bool = False) -> int:
        """Returns the bytes that ``op(*args, **kwargs)``, of `flops` FLOPs, allocates beyond its results.

        With `by_values` these depend on values, as with a mask, and are not remembered: the cache's keys hold layouts.
        """
        probe = probe_scratch if by_values else self._probe_scratch
        if op is _EXPONENTIAL:
            return _most_for_exponential(args[0])
        if self._probe:
            return probe(op, args, kwargs).scratch_bytes
        rule = rule_of(op)
        if rule.batched and args[0].dim() > 0:
            return self._of_batch(op, args, kwargs, flops)
        if rule.rows is not None:
            expanded = [tensor for tensor in tensors_in(args, {}) if tensor.dim() > 1 and 0 in tensor.stride()[-2:]]
            if expanded and args[-1].dtype not in _HALF:  # a matrix product copies a matrix with a stride of 0
                return sum(tensor.nbytes for tensor in expanded)
            if odd := [tensor for tensor in tensors_in(args, {}) if tensor.dim() > 1 and not _is_plain(tensor)]:
                if _cost(flops, odd) > _LARGEST_PROBE_FLOPS:
                    return sum(tensor.nbytes for tensor in odd)
                return self._probe_scratch(op, args, kwargs).scratch_bytes
            if args[-1].dtype not in _HALF:
                return 0
            at = rule.rows
            rows = args[at][:_ENOUGH_ROWS] if args[at].dim() == 2 else args[at]
            return self._probe_scratch(op, (*args[:at], rows, *args[at + 1 :]), kwargs).scratch_bytes
        if not _may_take_memory(op, args, kwargs):
            return self._of_numbers(op, args, kwargs)
        tensors = tensors_in(args, kwargs)
        if op.overloadpacket.__name__.startswith(_FACTORISES):
            matrices = [tensor for tensor in tensors if tensor.dim() > 1]
            flops += sum(4 * tensor.numel() * max(tensor.shape[-2:]) for tensor in matrices)
            if flops > _LARGEST_PROBE_FLOPS:
                return sum(tensor.nbytes for tensor in matrices)  # LAPACK works in place, so PyTorch passes a copy
        if _cost(flops, tensors) > _LARGEST_PROBE_FLOPS and not by_values:
            return 0
        # A kernel may refuse zeros, or indices beyond a smaller batch, and still take the user's values.
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            return probe(op, args, kwargs).scratch_bytes
        return 0

    def save(self) -> None:
        """Writes the measurements to disk if any were made since the last write."""
        if self._changed:
            self._changed = False
            probes = {key: (probe.changes, probe.returned_bytes) for key, probe in self._known.items()}
            self._disk.write(self._name, probes)

    def _of_numbers(self, op: OpOverload, args: Any, kwargs: Any) -> int:
        """Returns the bytes of a pointwise call's numbers: PyTorch makes each a tensor, and casts that if need be."""
        is_pointwise = torch.Tag.pointwise in op.tags or op.overloadpacket.__name__.startswith("_foreach_")
        if not (is_pointwise and _has_numbers(args)) or torch.Tag.nondeterministic_seeded in op.tags:
            return 0
        if tensors_in((), kwargs):  # out=...: a kernel warns if it resizes that
            return 0
        ones = {id(tensor): tensor.new_ones((1,) * tensor.dim()) for tensor in tensors_in(args, {})}
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            return self._probe_scratch(op, exchanged(tuple(args), ones), kwargs).scratch_bytes
        return 0

    def _of_batch(self, op: OpOverload, args: Any, kwargs: Any, flops: int) -> int:
        batched = args[: rule_of(op).batched]
        samples = batched[0].shape[0]
        affordable = samples * _LARGEST_PROBE_FLOPS // max(1, _cost(flops, batched))
        if affordable >= samples:
            return self._probe_scratch(op, args, kwargs).scratch_bytes
        if affordable < 2:
            # Two samples are too slow to run. oneDNN copies contiguous float32 tensors into another layout, so the
            # estimate is one copy of each.
            return sum(tensor.nbytes for tensor in batched)
        few, more = affordable // 2, affordable
        of_few, of_more = (
            self._probe_scratch(op, _first(args, len(batched), count), _first_named(kwargs, samples, count))
            for count in (few, more)
        )
        return of_few.extended(of_more, (samples - more) / (more - few)).scratch_bytes

    def _probe_scratch(self, op: OpOverload, args: Any, kwargs: Any) -> ScratchProbe:
        called = signature(args, kwargs, [], loose=True)
        try:
            hash(called)  # the repr of an unhashable argument may contain its address, so it is no key
        except TypeError:
            return probe_scratch(op, args, kwargs)
        key = repr((op, *called))
        if key not in self._known:
            self._known[key] = probe_scratch(op, args, kwargs)
            self._changed = True
        return self._known[key]

    @functools.cached_property
    def _known(self) -> dict[str, ScratchProbe]:
        try:
            probes = (self._disk.read(self._name) or {}).items()
            return {key: ScratchProbe(tuple(changes), returned_bytes) for key, (changes, returned_bytes) in probes}
        except (AttributeError, ValueError, TypeError):  # the file is from another version of memscale
            return {}


def _has_numbers(args: Any) -> bool:
    return any(_has_numbers(arg) if isinstance(arg, (list, tuple)) else isinstance(arg, (int, float)) for arg in args)


def _first(args: Any, batched: int, count: int) -> Any:
    """Returns `args` with the first `count` samples of the first `batched` tensors, and with shapes cut likewise."""
    whole = list(args[0].shape)

    def cut(arg: Any) -> Any:
        is_shape = isinstance(arg, (list, tuple)) and len(arg) == len(whole) and arg[0] == whole[0]
        return [count, *arg[1:]] if is_shape else arg

    return (*(tensor[:count] for tensor in args[:batched]), *map(cut, args[batched:]))


def _first_named(kwargs: Any, samples: int, count: int) -> Any:
    """Returns `kwargs` with the first `count` entries of tensors that have one entry for each sample (a mask may)."""
    return {
        name: value[:count] if isinstance(value, torch.Tensor) and value.shape[:1] == (samples,) else value
        for name, value in kwargs.items()
    }


def _is_plain(matrices: torch.Tensor) -> bool:
    """Whether BLAS takes the matrices without a copy: contiguous rows or columns, and no conjugate views."""
    (rows, columns), (down, across) = matrices.shape[-2:], matrices.stride()[-2:]
    whole = (across == 1 and down >= columns) or (down == 1 and across >= rows) or 1 in (rows, columns)
    return whole and not matrices.is_conj()


def _most_for_exponential(matrices: torch.Tensor) -> int:
    size = matrices.shape[-1]
    if size < 2 or not matrices.numel():
        return 0
    count = matrices.numel() // size**2
    held = (_OF_ONE if count == 1 else _OF_SEVERAL) * size**2 + _NUMBERS
    return count * held * matrices.itemsize


def _cost(flops: int, tensors: Sequence[torch.Tensor]) -> int:
    return flops + _FLOPS_PER_BYTE * sum(tensor.nbytes for tensor in tensors)


def _may_take_memory(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether `op` may take scratch memory for arguments with these layouts, so that it has to be probed."""
    name = op.overloadpacket.__name__
    tensors = tensors_in(args, kwargs)
    random = torch.Tag.nondeterministic_seeded in op.tags  # one more draw would change every later draw of the process
    scratch = rule_of(op).scratch
    if op.namespace != "aten" or random or not tensors or scratch == "nothing" or name.startswith((*_MAKES, *_LOOPS)):
        return False
    if scratch == "sums":  # 16-bit floats are summed in 32 bits, bools in 64
        return (kwargs.get("dtype") or tensors[0].dtype) is not tensors[0].dtype or tensors[0].dtype not in _WIDE
    if (torch.Tag.pointwise in op.tags and not rule_of(op).composed_on) or scratch == "converts":
        # An operand of another dtype is converted as a whole, and a gradient of another layout is copied.
        floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 0]
        other_dtype = len({tensor.dtype for tensor in tensors if tensor.dim() > 0}) > 1
        return other_dtype or (name.endswith("_backward") and not all(tensor.is_contiguous() for tensor in floating))
    return not (scratch == "copies" and all(tensor.is_contiguous() for tensor in tensors))


def probe_scratch(op: OpOverload, args: Any, kwargs: Any) -> ScratchProbe:
    """Runs `op` once on zeros and returns the bytes that it allocated.

    Fake zeros, which take no memory, replace the caller's floating-point tensors: `native_batch_norm` writes to
    running statistics although its schema does not say so. Real zeros replace the arguments that `op` writes to.
    """
    fakes = FakeStorages()
    own = {id(tensor): fakes.like(tensor) for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()}
    own |= {id(tensor): torch.zeros_like(tensor) for tensor in written_by(written_arguments(op), args, kwargs)}
    args, kwargs = exchanged(tuple(args), own), exchanged(kwargs, own)
    return watched(lambda: with_own_draws(op)(*args, **kwargs), tensors_in(args, kwargs))[1]


def watched(run: Callable[[], Any], given: Sequence[torch.Tensor]) -> tuple[Any, ScratchProbe]:
    """Returns the result of the kernel `run` and its allocations; storages of `given` tensors count as not returned."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    result, threads = (_in_another_thread if internals.autograd._profiler_enabled() else _recorded)(run)
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    changes = tuple(event.cpu_memory_usage() for event in events)
    storages = {tensor.untyped_storage() for tensor in strided_parts(tensors_in((result,), {}))}
    returned = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in known}
    return result, ScratchProbe(changes, sum(returned.values()))


def _recorded(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the result of `run`, and the profiler's events by thread."""
    # The legacy profiler: Kineto takes milliseconds to start, and logs a line to the terminal each time.
    _profiler._enable_profiler_legacy(_RECORD_MEMORY)
    try:
        result = run()
    finally:
        threads = _profiler._disable_profiler_legacy()
    return result, threads


def _in_another_thread(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Does `_recorded` beside a profiler of the caller, which records its own thread only, and would end here.

    A `threading.Thread` would run under the simulation.
    """
    found: Future[tuple[Any, Any]] = Future()

    def work() -> None:
        try:
            with torch.no_grad():
                found.set_result(_recorded(run))
        except BaseException as error:  # raised in the thread that waits
            found.set_exception(error)

    _thread.start_new_thread(work, ())
    return found.result()
