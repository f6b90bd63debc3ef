"""What PyTorch's own batch norm does with the allocator on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memscale.simulation.kernels.cuda_fused import normalises_by_cudnn
from memscale.simulation.kernels.cuda_reductions import reduced
from memscale.simulation.kernels.programs import (
    PLAIN,
    RESULTS,
    Capability,
    Program,
    Result,
    briefly,
    has_channels_last,
    taken,
)


def _batch_norm(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """The statistics of a batch that lies otherwise than by images or with its channels last: a reduction, in float32.

    Source: ``batch_norm_choose_impl`` and ``batch_norm_mean_var`` in aten/src/ATen/native/cuda/Normalization.cu.
    """
    x, training = args[0], args[5]
    if training and _by_rows(x) and not (args[1] is not None and normalises_by_cudnn(x, args[1])):
        return RESULTS, *briefly(*_parts_of_rows(x, 4))
    if not training or x.is_contiguous() or has_channels_last(x):
        return PLAIN
    wide = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32), device="meta")
    dims = [dim for dim in range(x.dim()) if dim != 1]
    moments = [wide.new_empty(x.size(1))] * 2
    scratch = reduced("aten.var_mean.correction", (wide, dims), moments, capability, multiprocessors)
    return RESULTS, *taken(0 if wide.dtype == x.dtype else wide.nbytes), *scratch


def _batch_norm_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Two sums over the rows, and their parts, before the gradient of the batch.

    Source: ``batch_norm_backward_cuda`` and ``batch_norm_backward_reduce_cuda_channels_last_template``.
    """
    grad, x, weight, training, wanted = args[0], args[1], args[2], args[7], args[9]
    if not (training and weight is not None and all(wanted) and _by_rows(grad) and _by_rows(x)):
        return PLAIN
    if normalises_by_cudnn(x, weight):
        return PLAIN
    each = x.size(1) * max(4, x.itemsize)
    return each, each, Result(1), Result(2), *briefly(*_parts_of_rows(x, 2)), Result(0)


def _by_rows(x: torch.Tensor) -> bool:
    """Whether a batch has its channels last: a matrix has."""
    return has_channels_last(x) or (x.is_contiguous() and x.stride(1) == 1)


def _parts_of_rows(x: torch.Tensor, numbers: int) -> tuple[int, int]:
    """What blocks that share a column put down for each other, so many numbers each, and the semaphores between them.

    Source: ``flexible_launch_configs`` in aten/src/ATen/native/cuda/Normalization.cuh.
    """
    columns = x.size(1)
    rows = x.numel() // columns
    wide = min(_power_below(columns), 32)
    high = min(_power_below(-(-rows // 16)), 512 // wide)
    wide = min(_power_below(columns), 512 // high)
    blocks = min(-(-rows // (16 * high)), 128)
    if blocks < 8:
        return 0, 0
    return numbers * columns * blocks * max(4, x.itemsize), -(-columns // wide) * 4


def _power_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


BATCH_NORMS: Mapping[str, Callable[[Sequence[Any], Capability, int], Program]] = {
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
}
