"""Embeddings, indices, packed sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memscale.core import internals
from memscale.simulation.rules.rule import PLAIN, RESULTS, CardTraits, OpRule, Program, Touch, copied, passes, taken


def _sorted_pairs(count: int, largest: int, item: int = 8) -> tuple[int, int, int, int]:
    """Returns the program of a radix sort: keys, values, the positions, then cub's temporary storage.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh: a second pair of buffers for more than one pass over 8 bits,
    256 counters of 8 bytes a pass, and a look-back for about every 4096 pairs.
    """
    each = count * item
    if count <= 2304:  # one block of threads sorts them
        return each, each, each, 1
    passes = math.ceil(max(1, largest.bit_length()) / 8)
    temporary = (2 * each if passes > 1 else 0) + 2048 * passes + 1024 * math.ceil(count / 4096) + 511
    return each, each, each, temporary


def _embedding_dense_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of sorted indices, segments, and partial sums of up to ten rows for every segment.

    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu (NROWS_PER_THREAD = 10).
    """
    grad, indices, num_weights, _, by_frequency = args[:5]
    count, item = indices.numel(), indices.itemsize
    copies = taken(copied(grad), copied(indices))
    if count <= 3072 and not by_frequency:
        return *copies, RESULTS
    rows = _rows_of_embedding(
        grad, count, item, num_weights, by_frequency, _adds_at_once(grad, count, num_weights, card)
    )
    return *copies, *rows


def _adds_at_once(grad: torch.Tensor, count: int, num_weights: int, card: CardTraits) -> bool:
    """Whether partial sums are added up in place: for few, long segments (a small vocabulary), since torch 2.11."""
    segments = min(count, num_weights)
    threads = 32 * math.ceil(grad.size(-1) / 32)
    blocks = math.ceil(segments * threads / min(threads, 1024))
    few = blocks < 4 * card.multiprocessors and count // 10 + segments > 4 * blocks
    return few and internals.TORCH_VERSION >= (2, 11) and not torch.are_deterministic_algorithms_enabled()


def _rows_of_embedding(
    grad: torch.Tensor, count: int, item: int, num_weights: int, by_frequency: bool, at_once: bool = False
) -> Program:
    segments = min(count, num_weights)
    partials = count // 10 + segments
    sums = (partials * grad.size(-1) * max(4, grad.itemsize),)
    if at_once:  # the segment of each partial sum, and a float32 sum besides a 16-bit result
        sums = (partials * item, *((num_weights * grad.size(-1) * 4,) if grad.itemsize < 4 else ()))
    keys, values, positions, temporary = _sorted_pairs(count, num_weights, item)
    frequencies = (count * item,) if by_frequency else ()
    return (
        *(keys, values, positions, temporary, -temporary, -positions, *frequencies, RESULTS),
        *(count * item, 8, count * item, 1279, -1279, -count * item),
        *(segments * item, segments * item, 1279, -1279, 8, partials * item, *sums),
    )


def _embedding_bag_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``embedding_bag_backward_cuda_sum_avg`` in aten/src/ATen/native/cuda/EmbeddingBag.cu."""
    grad, indices, num_weights = args[0], args[1], args[6]
    return *taken(copied(grad)), *_rows_of_embedding(grad, indices.numel(), indices.itemsize, int(num_weights), False)


def _bags(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scales: bool = False, mode: int = 0, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Computes the bag of each index, and for ``max`` the largest of each bag (``_embedding_bag_cuda``)."""
    ends_with_offset = len(rest) > 2 and rest[2]
    bags = offsets.size(0) - bool(ends_with_offset)
    largest = (bags, weight.size(1)) if mode == 2 else (0,)
    return weight.new_empty(bags, weight.size(1)), *map(indices.new_empty, (indices.shape, offsets.shape, largest))


def _embedding(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    return *taken(copied(args[1])), RESULTS


def _index(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``AdvancedIndex`` in aten/src/ATen/native/TensorAdvancedIndexing.cpp: on CUDA several indices have one
    layout, or are copied."""
    chosen = [index for index in args[1] if index is not None and index.dtype not in (torch.bool, torch.uint8)]
    expanded = torch.broadcast_tensors(*chosen) if len(chosen) > 1 else []
    if all(index.stride() == expanded[0].stride() for index in expanded):
        return PLAIN
    return *taken(*map(copied, expanded)), RESULTS


def _index_put(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of an accumulation, which sorts the linear indices together with their positions.

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


def _index_put_checked(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of `index_put_`, which checks the bounds of each index before it writes.

    A backward pass calls the out-of-place operator with ``unsafe``, without checks.
    Source: ``index_backward`` in FunctionsManual.cpp.
    """
    program = _index_put(args, results, card)
    checks = (8, 8, 1, -1, 1, -1, -8, -8) * sum(index is not None for index in args[1])
    return program if program == PLAIN else (RESULTS, *checks, *program[1:])


def _packed(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of whole row blocks, one for each run of steps with equally many sequences, and the joined
    result.

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


_LOOKED_UP, _SCATTERED = {"self": Touch.LOOK_UP}, {"self": Touch.SCATTER}
_ROWS = {"weight": Touch.LOOK_UP}

RULES = {
    "aten.embedding": OpRule(program=_embedding, touches=_ROWS, scratch="copies", by_place=True),
    "aten.embedding_dense_backward": OpRule(program=_embedding_dense_backward, scratch="copies", time=passes(5.0, 2.7)),
    "aten._embedding_bag": OpRule(order=(2, 1, 0, 3), results=_bags, touches=_ROWS),
    "aten._embedding_bag_forward_only": OpRule(touches=_ROWS),
    "aten._embedding_bag_backward": OpRule(program=_embedding_bag_backward),
    "aten.index": OpRule(program=_index, touches=_LOOKED_UP, by_place=True),
    "aten.gather": OpRule(touches=_LOOKED_UP, by_place=True),
    "aten.index_select": OpRule(touches=_LOOKED_UP, by_place=True),
    "aten.take": OpRule(touches=_LOOKED_UP),
    "aten.index_put": OpRule(program=_index_put, in_place=True),
    "aten.index_put_": OpRule(program=_index_put_checked, touches=_SCATTERED),
    "aten._index_put_impl_": OpRule(program=_index_put, touches=_SCATTERED),
    "aten._unsafe_index_put": OpRule(program=_index_put),
    "aten._unsafe_masked_index": OpRule(composed_on=("cuda",)),
    "aten._pack_padded_sequence": OpRule(program=_packed, on_host=(1,), values="lengths"),
    "aten._pad_packed_sequence": OpRule(on_host=(1,)),
    "aten.index_add_": OpRule(touches=_SCATTERED, time=passes(3.3, 1.6)),
    **{f"aten.{name}": OpRule(touches=_SCATTERED) for name in (
        "index_copy_", "index_fill_", "scatter_", "scatter_add_", "scatter_reduce_",
    )},
    "aten.index_add.default": OpRule(in_place=True),
    "aten.put.default": OpRule(in_place=True),
    "aten.scatter.src": OpRule(in_place=True),
    "aten.scatter.value": OpRule(in_place=True),
    "aten.scatter_add.default": OpRule(in_place=True),
    # The other arguments say where in it, as each step of a recurrence reads another row.
    "aten.diagonal_backward": OpRule(deciding=2),
    "aten.select_backward": OpRule(deciding=3, scratch="nothing"),
    "aten.slice_backward": OpRule(deciding=3, scratch="nothing"),
}  # fmt: skip
