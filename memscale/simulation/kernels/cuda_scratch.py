"""Device memory that CUDA kernels take beyond their inputs and outputs, which no fake kernel shows.

Known here: the workspaces of cuBLAS and cuBLASLt, the scratch of the ops in :data:`SCRATCH` and of reductions
(cuda_reductions.py), and the mask of dropout. Not known, because no source gives a formula: the workspace of cuDNN's
convolutions, RNNs, batch norms and attention (the chosen plan says it at run time), the small temporary storage of
cub's scans and sorts, and the split-KV buffers of a flash forward pass that is too small to fill the device.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F

from memscale.simulation.allocator.block_pool import round_up
from memscale.simulation.allocator.settings import MIN_BLOCK_BYTES
from memscale.simulation.kernels.attention import patched
from memscale.simulation.kernels.cuda_reductions import (
    REDUCTIONS,
    reduction_scratch_bytes,
    threads_per_multiprocessor,
)

Capability = tuple[int, int]

_KIB, _MIB = 1 << 10, 1 << 20
_TORCH: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


def cublas_workspace_bytes(
    capability: Capability, *, environ: Mapping[str, str] = os.environ, torch_version: tuple[int, int] = _TORCH
) -> int:
    """Return the bytes that PyTorch allocates for one cuBLAS handle and stream at its first matrix product.

    A handle belongs to a thread, so a training step pays twice: in the caller's thread with the first product
    of the forward pass, and in autograd's device thread with the first one of the backward pass. The bytes
    stay until the process ends.

    >>> cublas_workspace_bytes((8, 0), environ={}), cublas_workspace_bytes((9, 0), environ={})
    (8519680, 33554432)
    >>> cublas_workspace_bytes((9, 0), environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    33554432

    Args:
        capability: the device's compute capability, (major, minor).
        environ: where ``CUBLAS_WORKSPACE_CONFIG`` is looked up: ``:size:count`` pairs, the size in KiB.
        torch_version: whose rule to follow, (major, minor).

    Source: ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle`` in aten/src/ATen/cuda/CublasHandlePool.cpp
    of PyTorch 2.10 to 2.13, and the thread-local pool windows of aten/src/ATen/cuda/detail/DeviceThreadHandles.h.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * _KIB
    # Blackwell got Hopper's size with pytorch/pytorch#175344, after the branch of 2.11 was cut.
    wide = capability[0] in (9, 10, 12) if torch_version >= (2, 12) else capability == (9, 0)
    return 32 * _MIB if wide else (2 * 4096 + 8 * 16) * _KIB


def cublaslt_workspace_bytes(
    capability: Capability, *, environ: Mapping[str, str] = os.environ, torch_version: tuple[int, int] = _TORCH
) -> int:
    """Return what cuBLASLt takes in addition, for one handle and stream, at its first product.

    Products with an epilogue go to cuBLASLt, see :func:`uses_cublaslt`. From PyTorch 2.12 on it shares the
    workspace of cuBLAS, so that there is nothing to add.

    >>> cublaslt_workspace_bytes((8, 0), environ={}, torch_version=(2, 13))
    0
    >>> cublaslt_workspace_bytes((8, 0), environ={"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"})
    1048576

    Args:
        capability: the device's compute capability, (major, minor).
        environ: where ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` and ``CUBLASLT_WORKSPACE_SIZE`` (in KiB) are looked up.
        torch_version: whose rule to follow, (major, minor).

    Source: ``getCUDABlasLtWorkspace`` in aten/src/ATen/cuda/CublasHandlePool.cpp; the default became shared with
    pytorch/pytorch#175879.
    """
    unified = {"1": True, "0": False}.get(environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", ""))
    if unified or (unified is None and torch_version >= (2, 12)):
        return 0
    digits = re.match(r"\s*\d+", environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    nbytes = int(digits.group()) * _KIB if digits else _MIB
    if unified is None:
        # The size was capped as if it were shared before it was.
        nbytes = min(nbytes, cublas_workspace_bytes(capability, environ=environ, torch_version=torch_version))
    return nbytes


def uses_cublaslt(op: str, args: Sequence[Any], *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a product goes to cuBLASLt, which adds a bias vector in the same kernel; scaled products always do.

    >>> x, bias = torch.empty(8, 8, device="meta"), torch.empty(8, device="meta")
    >>> [uses_cublaslt("aten.addmm.default", (first, x, x)) for first in (bias, x)], uses_cublaslt("aten.mm", (x, x))
    ([True, False], False)

    Args:
        op: the overload as ``str(func)`` prints it, with its namespace.
        args: its positional arguments; ``beta`` and ``alpha`` are keywords, and rare.
        environ: where ``DISABLE_ADDMM_CUDA_LT`` is looked up.

    Source: ``isInputCompliesAddmmCudaLt`` in aten/src/ATen/native/cuda/Blas.cpp.
    """
    if op == "aten._scaled_mm.default":
        return True
    if op != "aten.addmm.default" or environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return False
    bias, left, right = args[:3]
    return (
        bias.dim() == 1
        and bias.size(0) == right.size(1)
        and bias.is_contiguous()
        and left.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and min(*left.shape, *right.shape) > 1
    )


def cuda_scratch_bytes(
    op: str, args: Sequence[Any], outputs: Any, capability: Capability, *, multiprocessors: int = 132
) -> int:
    """Return the most that the CUDA kernel of ``op`` holds beside its inputs and outputs while it runs.

    Each buffer counts as the allocator counts it, rounded up to 512 bytes.

    >>> grad, tokens = torch.empty(4, 1024, 768, device="meta"), torch.empty(4, 1024, dtype=torch.int64, device="meta")
    >>> args = (grad, tokens, 50257, -1, False)
    >>> cuda_scratch_bytes("aten.embedding_dense_backward.default", args, None, (8, 0))
    14040576
    >>> cuda_scratch_bytes("aten.relu.default", (grad,), None, (8, 0))
    0

    Args:
        op: the overload as ``str(func)`` prints it, with its namespace.
        args: its positional arguments; fake or meta tensors will do.
        outputs: what it returned.
        capability: the device's compute capability, (major, minor).
        multiprocessors: of the device; 132 is an H100.
    """
    if op in REDUCTIONS:
        threads = threads_per_multiprocessor(capability)
        return reduction_scratch_bytes(op, args, outputs, multiprocessors=multiprocessors, threads=threads)
    formula = SCRATCH.get(op)
    return 0 if formula is None else formula(args, capability, multiprocessors)


def _blocks(*nbytes: int) -> int:
    return sum(round_up(size, MIN_BLOCK_BYTES) for size in nbytes)


def _copied(tensor: torch.Tensor) -> int:
    """What ``contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.itemsize


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _embedding_dense_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """Sorted indices, segments, and a partial sum of up to ten rows for every segment.

    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu (NROWS_PER_THREAD = 10). The
    fused kernel for few, long segments, which takes no partial sums, is left out: it needs a tiny vocabulary.
    """
    grad, indices, num_weights, _, by_frequency = args[:5]
    count, item = indices.numel(), indices.itemsize
    copies = _blocks(_copied(grad), _copied(indices))
    if count <= 3072 and not by_frequency:
        return copies
    segments = min(count, num_weights)
    partials = count // 10 + segments
    sums = partials * grad.size(-1) * max(4, grad.itemsize)
    per_index = (count * item,) * (4 if by_frequency else 3)
    return copies + _blocks(*per_index, 8, segments * item, segments * item, 8, partials * item, sums)


def _index_put(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """Accumulation sorts the linear indices together with their positions.

    Source: ``index_put_with_sort_kernel`` in aten/src/ATen/native/cuda/Indexing.cu. Of cub's radix sort only the
    second pair of buffers is counted (``InvokeOnesweep`` in cub/device/dispatch/dispatch_radix_sort.cuh), which is
    98% of what it takes for large inputs.
    """
    target, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else False
    chosen = [index for index in indices if index is not None]
    if not accumulate or not chosen or any(index.dtype in (torch.bool, torch.uint8) for index in chosen):
        return 0
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in chosen)))
    kept = [size for axis, size in enumerate(target.shape) if axis >= len(indices) or indices[axis] is None]
    expanded = count * math.prod(kept)
    copied = values.numel() != expanded or not values.is_contiguous()
    values_bytes = expanded * values.itemsize if copied else 0
    return _blocks(_copied(target), values_bytes, *(count * 8,) * 6)


def _layer_norm_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """Partial gradients of weight and bias, where the rows are many and short.

    Source: ``LaunchGammaBetaBackwardCUDAKernel`` in aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    _, x, normalized_shape, _, _, weight, bias, output_mask = args[:8]
    columns = math.prod(normalized_shape)
    rows = x.numel() // columns if columns else 0
    if rows <= 64 * 1024 or columns // 32 >= multiprocessors // 2:
        return 0
    blocks = min(32 * 1024 // math.ceil(columns / 32), math.ceil(rows / 32))
    return _blocks(
        *(
            blocks * columns * parameter.itemsize
            for parameter, wanted in ((weight, output_mask[1]), (bias, output_mask[2]))
            if parameter is not None and wanted
        )
    )


def _softmax(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """Source: ``host_softmax`` in aten/src/ATen/native/cuda/SoftMax.cu."""
    return _blocks(_copied(args[0]))


def _log_softmax_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """Source: ``host_softmax_backward`` in aten/src/ATen/native/cuda/SoftMax.cu."""
    return _blocks(_copied(args[0]), _copied(args[1]))


def _softmax_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """The product of gradient and output, which the kernel takes in place of the gradient.

    Source: ``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu.
    """
    product = torch.mul(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in args[:2]))
    return _blocks(product.nbytes, _copied(product), _copied(args[1]))


def _flash_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """A float32 accumulator for the query's gradient, and per-head gradients of shared keys and values.

    Source: ``mha_bwd`` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, and
    ``_flash_attention_backward`` in attention_backward.cu, which makes the gradient and the output contiguous.
    """
    grad, query, key, _, out = args[:5]
    batch, heads, queries, head = query.shape
    rows = round_up(queries, 128)
    splits = math.ceil(multiprocessors / (batch * heads)) if _is_deterministic() else 1
    width = round_up(head, 32) if head <= 192 else 256
    shared = 0 if key.size(1) == heads else batch * key.size(2) * heads * head * query.itemsize
    return _blocks(
        _copied(grad.transpose(1, 2)),
        _copied(out.transpose(1, 2)),
        batch * heads * rows * 4,
        splits * batch * rows * heads * width * 4,
        shared,
        shared,
    )


def _efficient_forward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """A float32 output for heads that do not fit in registers.

    Source: ``kNeedsOutputAccumulatorBuffer`` in mem_eff_attention/kernel_forward.h; kernels/cutlassF.h has
    kernels for heads up to 64, up to 128 and larger.
    """
    query, key, value = args[:3]
    if query.itemsize == 4 or max(key.size(-1), value.size(-1)) <= 128:
        return 0
    return _blocks(math.prod(query.shape[:3]) * value.size(-1) * 4)


# 163 KiB of shared memory a block and more (CUDA C programming guide, technical specifications per compute
# capability): enough for the kernels with 128 queries a block. That they need more than 99 KiB is inferred.
_LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)})


def _efficient_tile(half: bool, width: int, capability: Capability) -> tuple[int, int, bool]:
    """Queries and keys a block, and whether the gradients of keys and values outgrow its registers."""
    large = capability in _LARGE_SHARED_MEMORY
    if half and capability >= (8, 0):
        if width <= 64:
            return 64, 64, False
        if width <= 96 and capability in ((8, 6), (8, 9)):
            return 128, 64, False
        if width <= 128 and large:
            return 128, 128, False
        return (128 if width > 128 and large else 64), 64, True
    # float32 needs no larger accumulator than the gradient itself.
    return (128 if width > 64 and large else 64), 64, half


def _efficient_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> int:
    """Row sums, float32 tiles of the query's gradient, and of the key's and value's where they outgrow registers.

    Source: ``_efficient_attention_backward`` in attention_backward.cu, ``workspace_size`` in
    mem_eff_attention/kernel_backward.h and the kernels listed in kernels/cutlassB.h.
    """
    grad, query, key, value = args[:4]
    batch, heads, queries, head = query.shape
    keys, value_head, half = key.size(2), value.size(-1), query.itemsize == 2
    rows, columns, spills = _efficient_tile(half, max(head, value_head), capability)

    row_sums = _blocks(batch * heads * queries * 4)
    outside = 0
    if not half or ((7, 0) <= capability < (7, 5) and spills):
        # The kernel wants the row sums of gradient times output ready; halves are cast to float32 before.
        outside = row_sums + (3 if half else 1) * _blocks(batch * heads * queries * value_head * 4)

    floats = 0
    if half or capability >= (7, 0):
        # A lock, a counter and padding come before the numbers of a tile.
        floats = math.ceil(queries / rows) * math.ceil(head / columns) * (4 + rows * columns)
    if spills:
        splits = max(1, min(math.ceil(keys / columns), 200 // (batch * heads)))
        if capability < (7, 0) or _is_deterministic():
            splits = 1
        floats += splits * columns * (round_up(head, rows) + round_up(value_head, rows))
    tiles = _blocks(batch * heads * round_up(floats, 4) * 4)
    return _blocks(_copied(grad.transpose(1, 2))) + row_sums + max(outside, tiles)


#: The ops whose scratch is known, by ``str(OpOverload)``.
SCRATCH: Mapping[str, Callable[[Sequence[Any], Capability, int], int]] = {
    "aten.embedding_dense_backward.default": _embedding_dense_backward,
    "aten.index_put.default": _index_put,
    "aten.index_put_.default": _index_put,
    "aten._index_put_impl_.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_forward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
}


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Make dropout on CPU tensors keep what it keeps on CUDA: one byte an element instead of the scaled noise.

    On CUDA ``at::dropout`` becomes ``native_dropout``, whose backward pass needs a bool mask; on CPU it is a
    product with noise of the input's dtype.

    >>> kept = []
    >>> with cuda_dropout(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), lambda t: t):
    ...     y = F.dropout(torch.ones(1000, requires_grad=True))
    >>> kept
    [1000]

    Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp.
    """
    of_module, of_torch = F.dropout, torch.dropout

    def takes(input: torch.Tensor, p: float, training: bool) -> bool:
        # Without training, and for 0 and 1, the general kernel runs on CUDA too, as it does in place.
        return training and 0 < p < 1 and input.numel() > 0

    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if inplace or not takes(input, p, training):
            return of_module(input, p, training, inplace)
        return cast(torch.Tensor, torch.ops.aten.native_dropout.default(input, p, True)[0])

    def drop_by_torch(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return drop(input, p) if takes(input, p, train) else of_torch(input, p, train)

    with patched(F, "dropout", drop), patched(torch, "dropout", drop_by_torch):
        yield
