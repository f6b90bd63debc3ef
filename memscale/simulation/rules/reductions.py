"""Device memory of CUDA's reductions: partial results of blocks that share an output, and the semaphores they meet at.

A reduction over many numbers with few outputs is split over thread blocks, and each leaves its partial results in
global memory. PyTorch asks for far more than it uses where threads hold several outputs (the size is multiplied by a
block's width although it counts outputs already), so that the bias gradient of ``nn.Linear(·, 768)`` over 8192 tokens
takes 48 MiB. The rule is that of ``setReduceConfig``, ``ReduceConfig`` and ``gpu_reduce_kernel`` in
aten/src/ATen/native/cuda/Reduce.cuh of PyTorch 2.13, over the dims that ``reorder_dimensions`` and
``coalesce_dimensions`` of aten/src/ATen/TensorIterator.cpp leave. What a kernel accumulates is said by
ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu, ReduceAMinMaxKernel.cu, ReduceArgMaxKernel.cu and
ReduceLogicKernel.cu in the same folder. Unknown: the bytes of count_nonzero and logsumexp, each several operators in
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memscale.simulation.rules.rule import RESULTS, CardTraits, OpRule, Program, of_columns

_WARP, _MOST_VALUES, _FEWEST_VALUES = 32, 256, 16
_INT32_MAX = 2**31 - 1
_HALVES = (torch.float16, torch.bfloat16)


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """Returns how many threads a multiprocessor holds at once.

    >>> [threads_per_multiprocessor(capability) for capability in ((7, 5), (8, 0), (8, 9), (9, 0))]
    [1024, 2048, 1536, 2048]

    Source: CUDA C programming guide, technical specifications per compute capability.
    """
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability >= (11, 0) else 2048


@dataclass(frozen=True)
class Reduction:
    """The compile-time parameters of a reduction kernel.

    Args:
        partial_bytes: dtype of the input -> bytes of one partial result.
        dims: the index of the operator's argument with the dims; None reduces all dims.
        vector: the number of elements that a thread reads at once.
        converts: whether an input of another dtype than the result's is first copied to the result's dtype.
        in_output: whether the output holds partial results between launches; None means for all but 16-bit floats.
        flattens: whether a full reduction copies a non-contiguous input.
    """

    partial_bytes: Callable[[torch.dtype], int]
    dims: int | None = 1
    vector: int = 4
    converts: bool = False
    in_output: bool | None = None
    flattens: bool = False


def _accumulated(dtype: torch.dtype) -> int:
    return 4 if dtype in _HALVES else dtype.itemsize


def _itself(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _magnitude(dtype: torch.dtype) -> int:
    return _accumulated(dtype.to_real())


def _with_index(dtype: torch.dtype) -> int:
    return 16  # a value of up to 8 bytes and an int64


def _moments(dtype: torch.dtype) -> int:
    return 4 * _magnitude(dtype)  # mean, sum of squares, and the count as an int32 and as a number; aligned


SUM = Reduction(_accumulated, converts=True)
ALL_SUM = replace(SUM, dims=None)


def reduced(kernel: Reduction, args: Sequence[Any], results: Any, card: CardTraits) -> tuple[int, ...]:
    """Returns the program of a reduction besides its input and results, in order of allocation.

    >>> grad = torch.empty(8192, 768, device="meta")
    >>> reduced(SUM, (grad, [0], True), grad.sum([0], True), CardTraits((9, 0)))
    (50331648, 24)
    >>> reduced(SUM, (grad, [1]), grad.sum(1), CardTraits((9, 0)))
    ()
    """
    threads = threads_per_multiprocessor(card.capability)
    source = args[0]
    result = results if isinstance(results, torch.Tensor) else results[0]
    given = args[kernel.dims] if kernel.dims is not None and len(args) > kernel.dims else None
    copied = 0
    fused = source.dtype in _HALVES and result.dtype == torch.float32
    if kernel.converts and source.dtype != result.dtype and not fused:
        source = torch.empty_strided(source.shape, source.stride(), dtype=result.dtype, device="meta").clone()
        copied = source.nbytes
    if kernel.flattens and given is None and not source.is_contiguous():
        source = torch.empty(source.shape, dtype=source.dtype, device="meta")
        copied = source.nbytes
    if not source.numel():
        return ()
    dims = [given] if isinstance(given, int) else given
    gone = {dim % source.dim() for dim in dims} if dims and source.dim() else set(range(source.dim()))
    loop = _Loop.over(source, gone)
    partial = kernel.partial_bytes(source.dtype)
    waiting = 0
    if not loop.fits_32_bits(source.itemsize, result.itemsize):
        in_output = kernel.in_output
        if in_output is None:
            in_output = not (source.dtype in _HALVES and result.dtype == source.dtype)
        if not in_output and result.itemsize < partial:
            waiting = partial * max(1, *(size * stride for size, stride in zip(loop.shape, loop.writes, strict=True)))
    blocks = _largest(loop, kernel, source.dtype, result.itemsize, card.multiprocessors, threads)
    return tuple(nbytes for nbytes in (copied, waiting, *blocks) if nbytes)


@dataclass(frozen=True)
class _Loop:
    """The loop over an input: the dims, fastest first, reduced dims before the others.

    Args:
        shape: the sizes.
        reads, writes: elements from one index to the next, in the input and in the output.
        start: the offset of the input in its storage, in elements.
    """

    shape: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    start: int = 0

    @classmethod
    def over(cls, source: torch.Tensor, reduced: set[int]) -> _Loop:
        writes, size = [0] * source.dim(), 1
        for dim in reversed(range(source.dim())):
            if dim not in reduced:
                writes[dim], size = size, size * source.size(dim)
        shape, reads = tuple(source.shape), source.stride()

        def order(one: int, other: int) -> int:
            for strides in (writes, reads):
                if strides is writes and (writes[one] == 0) != (writes[other] == 0):
                    return 1 if writes[other] == 0 else -1
                if strides[one] == 0 or strides[other] == 0:
                    continue
                if strides[one] != strides[other]:
                    return -1 if strides[one] < strides[other] else 1
                if shape[one] > shape[other]:
                    return 1
            return 0

        # An insertion sort, since not every pair has an order.
        dims = list(reversed(range(source.dim())))
        for at in range(1, len(dims)):
            moving = at
            for before in reversed(range(at)):
                comparison = order(dims[before], dims[moving])
                if comparison > 0:
                    dims[before], dims[moving] = dims[moving], dims[before]
                    moving = before
                elif comparison < 0:
                    break
        shape, reads, ordered_writes = (tuple(column[dim] for dim in dims) for column in (shape, reads, writes))
        return cls(shape, reads, ordered_writes, int(source.storage_offset()))._coalesced()

    def _coalesced(self) -> _Loop:
        if not self.shape:
            return self
        kept: list[tuple[int, int, int]] = []
        for size, read, write in zip(self.shape, self.reads, self.writes, strict=True):
            if kept:
                before, before_read, before_write = kept[-1]
                if 1 in (before, size) or (before * before_read, before * before_write) == (read, write):
                    kept[-1] = (before * size, *((read, write) if before == 1 else (before_read, before_write)))
                    continue
            kept.append((size, read, write))
        shape, reads, writes = zip(*kept, strict=True)
        return _Loop(shape, reads, writes, self.start)

    @property
    def outputs(self) -> int:
        return math.prod(size for size, write in zip(self.shape, self.writes, strict=True) if write)

    @property
    def reduced_dims(self) -> int:
        return self.writes.count(0)

    def _reaches(self, dim: int, read_bytes: int, write_bytes: int) -> int:
        return (self.shape[dim] - 1) * max(self.reads[dim] * read_bytes, self.writes[dim] * write_bytes)

    def fits_32_bits(self, read_bytes: int, write_bytes: int) -> bool:
        return math.prod(self.shape) <= _INT32_MAX and all(
            1 + sum((size - 1) * stride * item for size, stride in zip(self.shape, strides, strict=True)) <= _INT32_MAX
            for strides, item in ((self.reads, read_bytes), (self.writes, write_bytes))
        )

    def halves(self, read_bytes: int, write_bytes: int) -> tuple[_Loop, _Loop]:
        """Splits the loop in two along the dim with the largest extent in memory."""
        at = max(reversed(range(len(self.shape))), key=lambda dim: self._reaches(dim, read_bytes, write_bytes))
        first = self.shape[at] // 2
        return self._narrowed(at, 0, first), self._narrowed(at, first, self.shape[at] - first)

    def _narrowed(self, at: int, start: int, size: int) -> _Loop:
        shape = (*self.shape[:at], size, *self.shape[at + 1 :])
        narrowed = replace(self, shape=shape, start=self.start + start * self.reads[at])
        return narrowed._coalesced() if size == 1 else narrowed


def _largest(
    loop: _Loop, kernel: Reduction, dtype: torch.dtype, write_bytes: int, multiprocessors: int, threads: int
) -> tuple[int, ...]:
    """Returns the partial results and semaphores of one launch; a loop beyond 32-bit offsets is launched in parts."""
    if not loop.fits_32_bits(dtype.itemsize, write_bytes):
        parts = loop.halves(dtype.itemsize, write_bytes)
        return max((_largest(part, kernel, dtype, write_bytes, multiprocessors, threads) for part in parts), key=sum)
    return _launch(loop, kernel, dtype, multiprocessors, threads)


def _launch(loop: _Loop, kernel: Reduction, dtype: torch.dtype, multiprocessors: int, threads: int) -> tuple[int, ...]:
    outputs, dims = loop.outputs, loop.reduced_dims
    inputs = math.prod(loop.shape) // outputs
    # A block's width runs along the fastest dim in memory: over the inputs of one output, or over outputs.
    along_inputs = dims == len(loop.shape) or loop.reads[0] < loop.reads[dims]
    width, height = (inputs, outputs) if along_inputs else (outputs, inputs)
    dense = bool(loop.shape) and loop.reads[0 if along_inputs else dims] == 1
    vector = 1
    if dense and along_inputs and width >= 128 and dims == 1:
        width //= kernel.vector
    elif dense and not along_inputs:
        others = (*loop.reads[:dims], *loop.reads[dims + 1 :])
        vector = math.gcd(4, loop.start, loop.shape[dims], *others)
        width //= vector

    most = (256 if dtype == torch.complex128 else 512) // vector
    width_limit, height_limit = (min(_power_of_two(size), most) for size in (width, height))
    block_width = min(width_limit, _WARP)
    block_height = min(height_limit, most // block_width)
    block_width = min(width_limit, most // block_height)

    inputs_at_once = block_width if along_inputs else 1
    outputs_at_once = 1 if along_inputs else block_width
    if math.ceil(inputs / inputs_at_once) < min(block_height * 16, _MOST_VALUES):
        return ()  # a block's rows have outputs of their own, and every output has one block
    inputs_at_once *= block_height
    values = math.ceil(inputs / inputs_at_once)
    grid = math.ceil(outputs // vector / outputs_at_once)
    target = multiprocessors * (threads // (block_width * block_height))
    if values < _MOST_VALUES or grid > target:
        return ()
    fewest = math.ceil(values / _MOST_VALUES)
    splits = max(min(math.ceil(target / grid), math.ceil(values / _FEWEST_VALUES)), fewest)
    if splits == 1:
        return ()
    partials = kernel.partial_bytes(dtype) * outputs * splits * (1 if along_inputs else block_width * vector)
    return partials, 4 * grid


def _power_of_two(number: int) -> int:
    """Returns the largest power of two up to `number`."""
    return 1 << max(0, number.bit_length() - 1)


def _program(kernel: Reduction, args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    return RESULTS, *reduced(kernel, args, results, card)


def _rules(kernel: Reduction, *names: str, **more: Any) -> dict[str, OpRule]:
    return {f"aten.{name}": OpRule(program=partial(_program, kernel), **more) for name in names}


_PRODUCT = replace(SUM, in_output=True)  # measured on torch 2.13; the headers state no difference from a sum
_LOGIC = Reduction(lambda dtype: 1)
_EXTREME = Reduction(_itself)
_INDEX = Reduction(_with_index, in_output=False)
MOMENT = Reduction(_moments, vector=2, in_output=False)
_NORM = Reduction(_magnitude, dims=2)

RULES = {
    **_rules(ALL_SUM, "sum.default", "mean.default", time=of_columns, scratch="sums"),
    **_rules(SUM, "sum.dim_IntList", "mean.dim", time=of_columns, scratch="sums"),
    **_rules(SUM, "nansum.default"),
    **_rules(replace(_PRODUCT, dims=None), "prod.default"),
    **_rules(_PRODUCT, "prod.dim_int"),
    **_rules(_EXTREME, "amax.default", "amin.default"),
    **_rules(replace(_EXTREME, dims=None, flattens=True), "max.default", "min.default", values="choice", repeats=True),
    **_rules(_INDEX, "max.dim", "min.dim", values="choice"),
    **_rules(replace(_INDEX, flattens=True), "argmax.default", "argmin.default", values="choice"),
    **_rules(_LOGIC, "any.dim", "any.dims", "all.dim", "all.dims"),
    **_rules(replace(_LOGIC, dims=None), "any.default", "all.default", repeats=True),
    **_rules(_NORM, "linalg_vector_norm.default", scratch="sums"),
    **_rules(_NORM, "norm.ScalarOpt_dim"),
    **_rules(replace(_NORM, dims=None), "norm.Scalar"),
    **_rules(MOMENT, "var.correction", "std.correction", "var_mean.correction", scratch="sums"),
    **_rules(MOMENT, "std_mean.correction"),
}
