"""Memory that a CPU kernel takes inside one call, beside its results: found by running it, on less than it gets.

A convolution reorders its tensors into blocked layouts, and which ones depends on the processor's instruction set, the
shape and the dtype; only oneDNN knows. So it is asked: the kernel runs on zeros, on as many samples as are cheap and on
half as many. The sizes that it allocates are affine in the number of samples, each by itself (their peak, a maximum, is
not), so the sequence for all samples follows. Only operators that are known to take memory are asked; `probe` asks all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from memscale.profiling._hollow import HollowStorages
from memscale.profiling._kernel_cache import KernelCache, Sounding
from memscale.profiling._shapes import replaced, tensors_in, written_by

aten = torch.ops.aten

# A call of this many floating point operations takes some tenths of a second on one core.
_LARGEST_SOUNDING_FLOPS = 1 << 33
_FLOPS_PER_BYTE = 16  # what a core computes while it moves a byte

# Scratch memory that grows with the batch, and how many of the first arguments have it as their first dimension.
_BATCHED = {
    aten.convolution.default: 1,
    aten.convolution_backward.default: 2,
    aten.native_batch_norm.default: 1,
    aten.native_batch_norm_backward.default: 2,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 6,
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
}
# Products in 16 bits take a buffer that no longer grows with the rows from some hundred on; which argument has them.
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.baddbmm.default: 1}
_ENOUGH_ROWS = 512
_ALWAYS = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "native_group_norm_backward", "binary_cross_entropy"} | {
    "sort", "cumsum", "roll", "_safe_softmax", "cumprod", "logcumsumexp", "unique_consecutive",
}  # fmt: skip
_SUMS = {"sum", "mean", "var", "var_mean", "std"}  # of 16 bits in 32, of flags in 64
_HALF = (torch.bfloat16, torch.float16)


_profiler: Any = torch.autograd  # PyTorch's stubs do not know these functions
_RECORD_MEMORY = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
)


class CpuScratch:
    """The scratch memory of this machine's kernels, remembered on disk.

    Args:
        probe: run every kernel once on all that it gets.
    """

    def __init__(self, *, probe: bool) -> None:
        self._probe = probe
        self._cache = KernelCache()

    def nbytes(self, op: OpOverload, args: Any, kwargs: Any, flops: int) -> int:
        """The bytes that ``op(*args, **kwargs)`` allocates beside its results; `flops` is its arithmetic."""
        if self._probe:
            return self._sound(op, args, kwargs).scratch_bytes
        if op in _BATCHED and args[0].dim() > 0:
            return self._of_batch(op, args, kwargs, flops)
        if op in _PRODUCTS:
            expanded = [tensor for tensor in tensors_in(args, {}) if tensor.dim() > 1 and 0 in tensor.stride()[-2:]]
            if expanded:  # no product takes such a matrix as it is
                return sum(tensor.nbytes for tensor in expanded)
            if args[-1].dtype not in _HALF:
                return 0
            at = _PRODUCTS[op]
            rows = args[at][:_ENOUGH_ROWS] if args[at].dim() == 2 else args[at]
            return self._sound(op, (*args[:at], rows, *args[at + 1 :]), kwargs).scratch_bytes
        if not _takes_memory(op, args, kwargs) or _cost(flops, tensors_in(args, kwargs)) > _LARGEST_SOUNDING_FLOPS:
            return 0
        return self._sound(op, args, kwargs).scratch_bytes

    def _of_batch(self, op: OpOverload, args: Any, kwargs: Any, flops: int) -> int:
        batched, rest = args[: _BATCHED[op]], args[_BATCHED[op] :]
        samples = batched[0].shape[0]
        affordable = samples * _LARGEST_SOUNDING_FLOPS // max(1, _cost(flops, batched))
        if affordable >= samples:
            return self._sound(op, args, kwargs).scratch_bytes
        if affordable < 2:
            # Too slow to try. Both large tensors in another layout: what contiguous float32 tensors take.
            return sum(tensor.nbytes for tensor in batched)
        few, more = affordable // 2, affordable
        of_few, of_more = (
            self._sound(op, (*(tensor[:count] for tensor in batched), *rest), _first(kwargs, samples, count))
            for count in (few, more)
        )
        return of_few.extended(of_more, (samples - more) / (more - few)).scratch_bytes

    def _sound(self, op: OpOverload, args: Any, kwargs: Any) -> Sounding:
        return self._cache.get(op, args, kwargs, lambda: sound(op, args, kwargs))


def _first(kwargs: Any, samples: int, count: int) -> Any:
    """`kwargs` with the first `count` of the samples in tensors that have one entry for each, as a mask may."""
    return {
        name: value[:count] if isinstance(value, torch.Tensor) and value.shape[:1] == (samples,) else value
        for name, value in kwargs.items()
    }


def _cost(flops: int, tensors: Sequence[torch.Tensor]) -> int:
    return flops + _FLOPS_PER_BYTE * sum(tensor.nbytes for tensor in tensors)


def _takes_memory(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether `op` was seen to take memory on arguments like these."""
    name = op._opname
    if name in _ALWAYS:
        return True
    tensors = tensors_in(args, kwargs)
    if name in _SUMS:
        return bool(tensors) and tensors[0].dtype not in (torch.float32, torch.float64)
    if torch.Tag.pointwise in op.tags:
        # An operand of another dtype is converted whole, and a gradient of another layout copied.
        floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 0]
        other_dtype = len({tensor.dtype for tensor in tensors if tensor.dim() > 0}) > 1
        return other_dtype or (name.endswith("_backward") and not all(tensor.is_contiguous() for tensor in floating))
    if "layer_norm" in name or "softmax" in name:
        return not all(tensor.is_contiguous() for tensor in tensors)
    return False


def sound(op: OpOverload, args: Any, kwargs: Any) -> Sounding:
    """Run `op` once and return what it allocated.

    It gets zeros in place of the caller's numbers. They are hollow, so that they take no memory, except where the
    operator writes to them; `native_batch_norm` writes to running statistics without saying so, and must not reach the
    caller's.
    """
    hollow = HollowStorages()
    own = {id(tensor): hollow.like(tensor) for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()}
    own |= {id(tensor): torch.zeros_like(tensor) for tensor in written_by(op, args, kwargs)}
    args, kwargs = replaced(tuple(args), own), replaced(kwargs, own)
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
    # PyTorch's older profiler: the newer one takes milliseconds to start, and writes a line to the terminal each time.
    _profiler._enable_profiler_legacy(_RECORD_MEMORY)
    try:
        result = op(*args, **kwargs)
    finally:
        threads = _profiler._disable_profiler_legacy()
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    changes = tuple(event.cpu_memory_usage() for event in events)
    storages = {tensor.untyped_storage() for tensor in tensors_in((result,), {})}
    returned = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in given}
    return Sounding(changes, sum(returned.values()))
