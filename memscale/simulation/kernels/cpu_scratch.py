"""Memory that a CPU kernel takes inside one call, beside its results: found by running it, on less than it gets.

A convolution reorders its tensors into blocked layouts, and which ones depends on the processor's instruction set, the
shape and the dtype; only oneDNN knows. So it is asked: the kernel runs on zeros, on as many samples as are cheap and on
half as many. The sizes that it allocates are affine in the number of samples, each by itself (their peak, a maximum, is
not), so the sequence for all samples follows. Operators that only move numbers are not asked, nor what would take more
than some tenths of a second; `probe` asks all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch._ops import OpOverload

from memscale.simulation.kernels.kernel_cache import KernelCache
from memscale.simulation.kernels.shapes import exchanged, strided_parts, tensors_in, written_arguments, written_by
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.rules.registry import rule_of

aten = torch.ops.aten

# A call of this many floating point operations takes some tenths of a second on one core.
_LARGEST_PROBE_FLOPS = 1 << 33
_FLOPS_PER_BYTE = 16  # what a core computes while it moves a byte

_ENOUGH_ROWS = 512
# Operators that only move numbers are not worth asking. All else is asked: of PyTorch's own samples of its operators,
# those of about one in five take something that their results do not show, and new operators come with each release.
_MAKES = ("empty", "zeros", "ones", "full", "new_")
_LOOPS = ("_foreach_", "_fused_")  # an optimizer's, over the whole model
_FACTORISES = ("linalg_", "_linalg_", "cholesky", "lu_", "geqrf", "ormqr")
# The degree of its polynomial follows from its numbers, and zeros have the lowest. The highest holds so many matrices
# besides the result, of which several have it at once, and three numbers for each.
_EXPONENTIAL, _OF_ONE, _OF_SEVERAL, _NUMBERS = aten.linalg_matrix_exp.default, 12, 10, 3
_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


_profiler: Any = torch.autograd  # PyTorch's stubs do not know these functions
_RECORD_MEMORY = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
)


@dataclass(frozen=True)
class ScratchProbe:
    """What one call of a kernel allocated (positive) and freed (negative), in order, and the bytes that it returned.

    >>> few, more = ScratchProbe((30, 10, -30), 10), ScratchProbe((50, 20, -50), 20)
    >>> few.scratch_bytes, few.extended(more, 2.0)
    (30, ScratchProbe(changes=(90, 40, -90), returned_bytes=40))
    """

    changes: tuple[int, ...]
    returned_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """The most that lived at once, less what was returned."""
        return max(0, max(accumulate(self.changes), default=0) - self.returned_bytes)

    @classmethod
    def from_json(cls, data: Any) -> ScratchProbe:
        """The probe that `as_json` gave."""
        changes, returned_bytes = data
        return cls(tuple(changes), returned_bytes)

    def as_json(self) -> Any:
        """The probe in what JSON has."""
        return self.changes, self.returned_bytes

    def extended(self, more: ScratchProbe, steps: float) -> ScratchProbe:
        """The probe that is as much further on from `more`, `steps` times, as `more` is from this one."""
        if len(self.changes) != len(more.changes):  # another algorithm: only the sums can be compared
            returned = _further(self.returned_bytes, more.returned_bytes, steps)
            scratch = max(0, _further(self.scratch_bytes, more.scratch_bytes, steps))
            return ScratchProbe((returned + scratch, -scratch), returned)
        changes = [_further(here, there, steps) for here, there in zip(self.changes, more.changes, strict=True)]
        return ScratchProbe(tuple(changes), _further(self.returned_bytes, more.returned_bytes, steps))


def _further(here: int, there: int, steps: float) -> int:
    return there + round((there - here) * steps)


class CpuScratch:
    """The scratch memory of this machine's kernels, remembered on disk.

    Args:
        probe: run every kernel once on all that it gets.
    """

    def __init__(self, *, probe: bool) -> None:
        self._probe = probe
        self._cache = KernelCache("probes", ScratchProbe.from_json, ScratchProbe.as_json)

    def nbytes(self, op: OpOverload, args: Any, kwargs: Any, flops: int) -> int:
        """The bytes that ``op(*args, **kwargs)`` allocates beside its results; `flops` is its arithmetic."""
        if op is _EXPONENTIAL:
            return _most_for_exponential(args[0])
        if self._probe:
            return self._probe_scratch(op, args, kwargs).scratch_bytes
        rule = rule_of(op)
        if rule.batched and args[0].dim() > 0:
            return self._of_batch(op, args, kwargs, flops)
        if rule.rows is not None:
            expanded = [tensor for tensor in tensors_in(args, {}) if tensor.dim() > 1 and 0 in tensor.stride()[-2:]]
            if expanded and args[-1].dtype not in _HALF:  # no product takes such a matrix as it is
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
            return 0
        tensors = tensors_in(args, kwargs)
        if op._opname.startswith(_FACTORISES):
            matrices = [tensor for tensor in tensors if tensor.dim() > 1]
            flops += sum(4 * tensor.numel() * max(tensor.shape[-2:]) for tensor in matrices)
            if flops > _LARGEST_PROBE_FLOPS:
                return sum(tensor.nbytes for tensor in matrices)  # LAPACK works in place, so on a copy
        if _cost(flops, tensors) > _LARGEST_PROBE_FLOPS:
            return 0
        # A kernel may refuse zeros, or indices into what is no longer there, and take the user's numbers.
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            return self._probe_scratch(op, args, kwargs).scratch_bytes
        return 0

    def nbytes_by_values(self, op: OpOverload, args: Any, kwargs: Any) -> int:
        """The same of a call that takes what its values say, as a selection by a mask does: it is not remembered."""
        if not _may_take_memory(op, args, kwargs):
            return 0
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            return probe_scratch(op, args, kwargs).scratch_bytes
        return 0

    def save(self) -> None:
        """Write down what was found."""
        self._cache.save()

    def _of_batch(self, op: OpOverload, args: Any, kwargs: Any, flops: int) -> int:
        batched = args[: rule_of(op).batched]
        samples = batched[0].shape[0]
        affordable = samples * _LARGEST_PROBE_FLOPS // max(1, _cost(flops, batched))
        if affordable >= samples:
            return self._probe_scratch(op, args, kwargs).scratch_bytes
        if affordable < 2:
            # Too slow to try. Both large tensors in another layout: what contiguous float32 tensors take.
            return sum(tensor.nbytes for tensor in batched)
        few, more = affordable // 2, affordable
        of_few, of_more = (
            self._probe_scratch(op, _first(args, len(batched), count), _first_named(kwargs, samples, count))
            for count in (few, more)
        )
        return of_few.extended(of_more, (samples - more) / (more - few)).scratch_bytes

    def _probe_scratch(self, op: OpOverload, args: Any, kwargs: Any) -> ScratchProbe:
        return self._cache.get(op, args, kwargs, lambda: probe_scratch(op, args, kwargs))


def _first(args: Any, batched: int, count: int) -> Any:
    """`args` of the first `count` of the samples, which the first `batched` have, and a shape of all of them."""
    whole = list(args[0].shape)

    def cut(arg: Any) -> Any:
        is_shape = isinstance(arg, (list, tuple)) and len(arg) == len(whole) and arg[0] == whole[0]
        return [count, *arg[1:]] if is_shape else arg

    return (*(tensor[:count] for tensor in args[:batched]), *map(cut, args[batched:]))


def _first_named(kwargs: Any, samples: int, count: int) -> Any:
    """`kwargs` with the first `count` of the samples in tensors that have one entry for each, as a mask may."""
    return {
        name: value[:count] if isinstance(value, torch.Tensor) and value.shape[:1] == (samples,) else value
        for name, value in kwargs.items()
    }


def _is_plain(matrices: torch.Tensor) -> bool:
    """Whether a library's product surely takes them as they are: rows or columns without gaps, and no conjugates."""
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
    """Whether `op` is worth asking about arguments like these."""
    name = op._opname
    tensors = tensors_in(args, kwargs)
    random = torch.Tag.nondeterministic_seeded in op.tags  # a draw more would be another draw for all that follow
    scratch = rule_of(op).scratch
    if op.namespace != "aten" or random or not tensors or scratch == "nothing" or name.startswith((*_MAKES, *_LOOPS)):
        return False
    if scratch == "sums":  # of 16 bits in 32, of flags in 64
        return (kwargs.get("dtype") or tensors[0].dtype) is not tensors[0].dtype or tensors[0].dtype not in _WIDE
    if (torch.Tag.pointwise in op.tags and not rule_of(op).composed_on) or scratch == "converts":
        # An operand of another dtype is converted whole, and a gradient of another layout copied.
        floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 0]
        other_dtype = len({tensor.dtype for tensor in tensors if tensor.dim() > 0}) > 1
        return other_dtype or (name.endswith("_backward") and not all(tensor.is_contiguous() for tensor in floating))
    return not (scratch == "copies" and all(tensor.is_contiguous() for tensor in tensors))


def probe_scratch(op: OpOverload, args: Any, kwargs: Any) -> ScratchProbe:
    """Run `op` once and return what it allocated.

    It gets zeros in place of the caller's numbers. They are fake, so that they take no memory, except where the
    operator writes to them; `native_batch_norm` writes to running statistics without saying so, and must not reach the
    caller's.
    """
    fakes = FakeStorages()
    own = {id(tensor): fakes.like(tensor) for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()}
    own |= {id(tensor): torch.zeros_like(tensor) for tensor in written_by(written_arguments(op), args, kwargs)}
    args, kwargs = exchanged(tuple(args), own), exchanged(kwargs, own)
    return watched(lambda: op(*args, **kwargs), tensors_in(args, kwargs))[1]


def watched(run: Callable[[], Any], given: Sequence[torch.Tensor]) -> tuple[Any, ScratchProbe]:
    """What `run`, a kernel, returns, and what it allocated; memory of the tensors that are `given` is not returned."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    # PyTorch's older profiler: the newer one takes milliseconds to start, and writes a line to the terminal each time.
    _profiler._enable_profiler_legacy(_RECORD_MEMORY)
    try:
        result = run()
    finally:
        threads = _profiler._disable_profiler_legacy()
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    changes = tuple(event.cpu_memory_usage() for event in events)
    storages = {tensor.untyped_storage() for tensor in strided_parts(tensors_in((result,), {}))}
    returned = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in known}
    return result, ScratchProbe(changes, sum(returned.values()))
