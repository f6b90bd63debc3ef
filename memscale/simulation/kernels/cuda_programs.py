"""What the CUDA kernels of PyTorch's operators do with the allocator while they run, in order.

Seen on torch 2.13 with the recorder of its allocator; the formulas are the sources'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memscale.core import internals
from memscale.simulation.kernels.attention_programs import ATTENTION
from memscale.simulation.kernels.cuda_batch_norms import BATCH_NORMS
from memscale.simulation.kernels.cuda_convolutions import CONVOLUTIONS
from memscale.simulation.kernels.cuda_fused import FUSED_ORDER, FUSED_PROGRAMS, partial_gradients
from memscale.simulation.kernels.cuda_reductions import REDUCTIONS, reduced
from memscale.simulation.kernels.cuda_rnns import RNNS
from memscale.simulation.kernels.few_bits import OF_FEW_BITS, ORDER_OF_FEW_BITS
from memscale.simulation.kernels.programs import PLAIN, RESULTS, Capability, Program, copied, has_channels_last, taken

# The order in which results are taken, where it is not that in which they are returned.
_ORDER: Mapping[str, tuple[int, ...]] = {
    "aten.native_dropout.default": (1, 0),
    "aten.nll_loss2d_forward.default": (1, 0),
    "aten._scaled_dot_product_cudnn_attention.default": (2, 3, 0, 1),
    "aten._embedding_bag.default": (2, 1, 0, 3),
    **FUSED_ORDER,
    **ORDER_OF_FEW_BITS,
}
_ON_HOST = {
    "aten._scaled_dot_product_efficient_attention.default": (2, 3),  # seeds, but for a capture
    "aten._pack_padded_sequence.default": (1,),
    "aten._pad_packed_sequence.default": (1,),
}


def order_of(op: str) -> tuple[int, ...]:
    """The results of `op` in the order in which its kernel takes them, by number; ``()`` is as it returns them."""
    return _ORDER.get(op, ())


def in_order(order: tuple[int, ...], results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results that a kernel takes from the device in this order; those that it does not name come last.

    >>> x = torch.empty(8, device="meta")
    >>> dropped, mask = torch.ops.aten.native_dropout.default(x, 0.5, True)
    >>> [y.dtype for y in in_order(order_of("aten.native_dropout.default"), [dropped, mask])]
    [torch.bool, torch.float32]
    """
    first = [results[at] for at in order if at < len(results)]
    return first + [result for result in results if all(result is not one for one in first)]


def on_host(op: str) -> tuple[int, ...]:
    """Which results of `op` a CUDA kernel leaves on the CPU."""
    return _ON_HOST.get(op, ())


def cuda_program(
    op: str, args: Sequence[Any], outputs: Any, capability: Capability, multiprocessors: int = 132
) -> Program:
    """What the CUDA kernel of `op` does with memory while it runs.

    >>> grad = torch.empty(8192, 768, device="meta")
    >>> cuda_program("aten.sum.dim_IntList", (grad, [0], True), grad.sum([0], True), (9, 0))
    (0, 50331648, 24)

    Args:
        op: the overload as ``str(func)`` prints it, with its namespace.
        args: its positional arguments; fake or meta tensors will do.
        outputs: what it returned.
        capability: the device's compute capability, (major, minor).
        multiprocessors: of the device; 132 is an H100.
    """
    if op in REDUCTIONS and op.endswith(".correction") and args[0].is_complex():
        return _moment_of_complex(op, args, outputs, capability, multiprocessors)
    if op in REDUCTIONS:
        return RESULTS, *reduced(op, args, outputs, capability, multiprocessors)
    formula = PROGRAMS.get(op)
    return PLAIN if formula is None else formula(args, capability, multiprocessors)


def _moment_of_complex(
    op: str, args: Sequence[Any], outputs: Any, capability: Capability, multiprocessors: int
) -> Program:
    """Those of the real parts and of the imaginary ones, each whole with its scratch, and then their sum.

    Source: ``std_var_out`` and ``std_var_mean_out`` in aten/src/ATen/native/ReduceOps.cpp.
    """
    source, results = args[0], [outputs] if isinstance(outputs, torch.Tensor) else outputs
    strides = [2 * stride for stride in source.stride()]
    part = torch.empty_strided(source.shape, strides, dtype=source.dtype.to_real(), device="meta")
    scratch = reduced(op, (part, *args[1:]), outputs, capability, multiprocessors)
    half = *[results[0].nbytes] * len(results), *scratch, *(-nbytes for nbytes in reversed(scratch))
    return *taken(*half, *half), RESULTS


def _copied_image(tensor: torch.Tensor) -> int:
    """What ``contiguous(memory_format)`` allocates, in the format that suits the tensor best."""
    return 0 if has_channels_last(tensor) else copied(tensor)


def _product(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """A copy of each matrix without a dense dimension.

    Source: ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas`` in aten/src/ATen/native/cuda/Blas.cpp.
    """
    copies = []
    for matrix in args[-2:]:
        rows, columns = matrix.shape[-2:]
        down, across = matrix.stride()[-2:]
        dense = (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns))
        copies.append(0 if dense or not matrix.numel() else matrix.numel() * matrix.itemsize)
    return RESULTS, *taken(*copies)


def _sorted_pairs(count: int, largest: int, item: int = 8) -> tuple[int, int, int, int]:
    """Keys, values and the positions from which those come, then cub's temporary storage.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh: the second pair of buffers where one pass over 8 bits is not
    enough, 256 counters of 8 bytes a pass, and a look-back for every 4096 pairs or so.
    """
    each = count * item
    if count <= 2304:  # one block of threads sorts them
        return each, each, each, 1
    passes = math.ceil(max(1, largest.bit_length()) / 8)
    temporary = (2 * each if passes > 1 else 0) + 2048 * passes + 1024 * math.ceil(count / 4096) + 511
    return each, each, each, temporary


def _embedding_dense_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Sorted indices, segments, and a partial sum of up to ten rows for every segment.

    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu (NROWS_PER_THREAD = 10).
    """
    grad, indices, num_weights, _, by_frequency = args[:5]
    count, item = indices.numel(), indices.itemsize
    copies = taken(copied(grad), copied(indices))
    if count <= 3072 and not by_frequency:
        return *copies, RESULTS
    rows = _rows_of_embedding(
        grad, count, item, num_weights, by_frequency, _adds_at_once(grad, count, num_weights, multiprocessors)
    )
    return *copies, *rows


def _adds_at_once(grad: torch.Tensor, count: int, num_weights: int, multiprocessors: int) -> bool:
    """Whether sums of ten rows are added up in place: of few, long segments (a small vocabulary), since torch 2.11."""
    segments = min(count, num_weights)
    threads = 32 * math.ceil(grad.size(-1) / 32)
    blocks = math.ceil(segments * threads / min(threads, 1024))
    few = blocks < 4 * multiprocessors and count // 10 + segments > 4 * blocks
    return few and internals.TORCH_VERSION >= (2, 11) and not torch.are_deterministic_algorithms_enabled()


def _rows_of_embedding(
    grad: torch.Tensor, count: int, item: int, num_weights: int, by_frequency: bool, at_once: bool = False
) -> Program:
    segments = min(count, num_weights)
    partials = count // 10 + segments
    sums = (partials * grad.size(-1) * max(4, grad.itemsize),)
    if at_once:  # the segment of each, and a sum in float32 beside a result in 16 bits
        sums = (partials * item, *((num_weights * grad.size(-1) * 4,) if grad.itemsize < 4 else ()))
    keys, values, positions, temporary = _sorted_pairs(count, num_weights, item)
    frequencies = (count * item,) if by_frequency else ()
    return (
        *(keys, values, positions, temporary, -temporary, -positions, *frequencies, RESULTS),
        *(count * item, 8, count * item, 1279, -1279, -count * item),
        *(segments * item, segments * item, 1279, -1279, 8, partials * item, *sums),
    )


def _embedding_bag_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``embedding_bag_backward_cuda_sum_avg`` in aten/src/ATen/native/cuda/EmbeddingBag.cu."""
    grad, indices, num_weights = args[0], args[1], args[6]
    return *taken(copied(grad)), *_rows_of_embedding(grad, indices.numel(), indices.itemsize, int(num_weights), False)


def _embedding(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    return *taken(copied(args[1])), RESULTS


def _index(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``AdvancedIndex`` in aten/src/ATen/native/TensorAdvancedIndexing.cpp: on CUDA several indices have one
    layout, or are copied."""
    chosen = [index for index in args[1] if index is not None and index.dtype not in (torch.bool, torch.uint8)]
    expanded = torch.broadcast_tensors(*chosen) if len(chosen) > 1 else []
    if all(index.stride() == expanded[0].stride() for index in expanded):
        return PLAIN
    return *taken(*map(copied, expanded)), RESULTS


def _index_put(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Accumulation sorts the linear indices together with their positions.

    Source: ``index_put_with_sort_kernel`` in aten/src/ATen/native/cuda/Indexing.cu.
    """
    target, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else False
    chosen = [index for index in indices if index is not None]
    if not accumulate or not chosen or any(index.dtype in (torch.bool, torch.uint8) for index in chosen):
        return PLAIN
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in chosen)))
    kept = [size for axis, size in enumerate(target.shape) if axis >= len(indices) or indices[axis] is None]
    expanded = count * math.prod(kept)
    whole = values.numel() == expanded and values.is_contiguous()
    values_bytes = 0 if whole else expanded * values.itemsize
    linear = count * 8
    rows = target.numel() // max(1, math.prod(kept))
    sizes = taken(copied(target), linear, linear, -linear, values_bytes)
    return RESULTS, *sizes, *_sorted_pairs(count, rows)


def _index_put_checked(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """That each index is within bounds, first: `index_put_` is asked by users, and out of place by a backward.

    Source: ``index_backward`` in FunctionsManual.cpp, which says ``unsafe``.
    """
    program = _index_put(args, capability, multiprocessors)
    checks = (8, 8, 1, -1, 1, -1, -8, -8) * sum(index is not None for index in args[1])
    return program if program == PLAIN else (RESULTS, *checks, *program[1:])


def _layer_norm(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    return *taken(copied(args[0])), RESULTS


def _layer_norm_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    grad, x, normalized_shape, _, _, weight, bias, output_mask = args[:8]
    columns = math.prod(normalized_shape)
    rows = x.numel() // columns if columns else 0
    parameters = [each for each, wanted in zip((weight, bias), output_mask[1:], strict=True) if wanted]
    partials = partial_gradients(rows, columns, [each for each in parameters if each is not None], multiprocessors)
    return *taken(copied(x)), RESULTS, *taken(copied(grad)), *partials


def _group_norm(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Scale and shift of every channel, in float32; of halves the statistics, too.

    Source: ``GroupNormKernelImplInternal`` in aten/src/ATen/native/cuda/group_norm_kernel.cu.
    """
    x, weight, bias, samples, channels, area, groups = args[:7]
    item = max(4, x.itemsize)
    statistics = samples * groups * item if x.itemsize < 4 else 0
    each = samples * channels * item if area > 1 and (weight is not None or bias is not None) else 0
    return *taken(_copied_image(x)), RESULTS, *taken(statistics, statistics, each, each)


def _group_norm_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Sums over every channel and every group, in float32.

    Source: ``GroupNormBackwardKernelImplInternal`` in aten/src/ATen/native/cuda/group_norm_kernel.cu.
    """
    grad, x, _, _, _, samples, channels, _, groups = args[:9]
    item = max(4, x.itemsize)
    channel, group = samples * channels * item, samples * groups * item
    return *taken(_copied_image(x), _copied_image(grad)), RESULTS, channel, channel, group, group, channel


def _copy_after(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``host_softmax`` in aten/src/ATen/native/cuda/SoftMax.cu; UpSampleNearest2d.cu and its like."""
    return RESULTS, *taken(copied(args[0]))


def _log_softmax_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``host_softmax_backward`` in aten/src/ATen/native/cuda/SoftMax.cu."""
    return RESULTS, *taken(copied(args[0]), copied(args[1]))


def _softmax_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """The product of gradient and output, which the kernel takes in place of the gradient.

    Source: ``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu.
    """
    product = torch.mul(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in args[:2]))
    return RESULTS, *taken(product.nbytes, copied(product), copied(args[1]))


def _safe_softmax(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Which scores are minus infinity, which rows are so as a whole, and a zero for those.

    Source: ``_safe_softmax`` in aten/src/ATen/native/transformers/attention.cpp.
    """
    scores = args[0]
    return RESULTS, *taken(scores.numel(), scores.numel() // max(1, scores.size(args[1])), 4)


def _mean_loss(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """The loss of each element, where their mean or sum is returned, and what that reduction takes.

    Source: aten/src/ATen/native/BinaryOps.cpp and PointwiseOps.cpp, the structured kernels of these losses.
    """
    x = args[0]
    reduction = next((each for each in args[2:] if isinstance(each, int) and not isinstance(each, bool)), 1)
    if not reduction:
        return PLAIN
    each = torch.empty(torch.broadcast_shapes(x.shape, args[1].shape), dtype=x.dtype, device="meta")
    total = torch.empty((), dtype=x.dtype, device="meta")
    scratch = reduced("aten.mean.default", (each,), total, capability, multiprocessors)
    return RESULTS, each.nbytes, *scratch


def _margin_loss(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``soft_margin_loss_out`` in aten/src/ATen/native/Loss.cpp: the sum of what the result is made of."""
    if (args[2] if len(args) > 2 else 1) == 0:
        return PLAIN
    total = torch.empty((), dtype=args[0].dtype, device="meta")
    return RESULTS, total.itemsize, *reduced("aten.sum.default", (args[0],), total, capability, multiprocessors)


def _margin_loss_backward(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``soft_margin_loss_backward_out``: the exponential of a product, then what it is divided by."""
    each = args[1].nbytes
    return RESULTS, each, each, -each, each


def _multi_margin_loss(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``multi_margin_loss_cuda_out`` in aten/src/ATen/native/cuda/MultiMarginLoss.cu."""
    rows = args[0].size(0) * args[0].itemsize if args[0].dim() > 1 else 0
    reduces = args[5] if len(args) > 5 else 1
    return RESULTS, *taken(rows if reduces else 0)


def _patches(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """Source: ``im2col_cuda``, whose result is made as large as the image, and then grows."""
    image = args[0].numel() * args[0].itemsize
    return *taken(image, copied(args[0])), RESULTS


def _folded(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    return RESULTS, *taken(copied(args[0]))


def _roll(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """One dimension after the other. Source: ``roll_cuda`` in aten/src/ATen/native/cuda/TensorTransformations.cu."""
    return *taken(copied(args[0]), args[0].nbytes if len(args[2]) > 1 else 0), RESULTS


def _norms(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """What every chunk of a tensor sums to, with room for as many of each tensor as the largest has.

    Source: ``foreach_tensor_norm_cuda`` in aten/src/ATen/native/cuda/ForeachReduceOp.cu (kChunkSize = 65536).
    """
    tensors = args[0]
    chunks = max(math.ceil(tensor.numel() / 65536) for tensor in tensors)
    return *taken(len(tensors) * chunks * max(4, tensors[0].itemsize)), RESULTS


def _packed(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """The rows of the steps that have equally many sequences, whole, from which the result is joined.

    Source: ``_pack_padded_sequence`` in aten/src/ATen/native/PackedSequence.cpp.
    """
    padded, lengths, batch_first = args
    steps = padded.transpose(0, 1) if batch_first else padded
    parts, begin = [], 0
    for shorter, length in enumerate(reversed(lengths.tolist())):
        if length > begin:
            parts.append(steps[begin:length, : steps.size(1) - shorter])
            begin = length
    copies = taken(*map(copied, parts))
    return *copies, RESULTS, *(-nbytes for nbytes in copies)


#: The ops whose programs are known, by ``str(OpOverload)``; reductions have one rule for all.
PROGRAMS: Mapping[str, Callable[[Sequence[Any], Capability, int], Program]] = {
    **ATTENTION,
    **CONVOLUTIONS,
    **RNNS,
    **FUSED_PROGRAMS,
    **OF_FEW_BITS,
    **dict.fromkeys(("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default"), _product),
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_dense_backward,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.index_put_.default": _index_put_checked,
    "aten._index_put_impl_.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    **BATCH_NORMS,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten._softmax.default": _copy_after,
    "aten._log_softmax.default": _copy_after,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._safe_softmax.default": _safe_softmax,
    "aten.upsample_nearest2d_backward.default": _copy_after,
    "aten.upsample_bilinear2d_backward.default": _copy_after,
    "aten.mse_loss.default": _mean_loss,
    "aten.smooth_l1_loss.default": _mean_loss,
    "aten.huber_loss.default": _mean_loss,
    "aten.binary_cross_entropy.default": _mean_loss,
    "aten.roll.default": _roll,
    "aten.soft_margin_loss.default": _margin_loss,
    "aten.soft_margin_loss_backward.default": _margin_loss_backward,
    "aten.multi_margin_loss.default": _multi_margin_loss,
    "aten._foreach_norm.Scalar": _norms,
    "aten._pack_padded_sequence.default": _packed,
    "aten.im2col.default": _patches,
    "aten.col2im.default": _folded,
}
