"""Layer, RMS, group and batch norms, softmaxes and losses.

Sources of the norms, in aten/src/ATen/native/cuda of PyTorch 2.13: layer_norm_kernel.cu, group_norm_kernel.cu,
Normalization.cu and Normalization.cuh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from memscale.core import OpOverload
from memscale.simulation.rules.layouts import ResultLayout, ordered_as, whole_storage, with_statistics
from memscale.simulation.rules.reductions import ALL_SUM, MOMENT, reduced
from memscale.simulation.rules.rule import (
    PLAIN,
    RESULTS,
    CardTraits,
    OpRule,
    Program,
    Result,
    Touch,
    briefly,
    copied,
    copy_after,
    has_channels_last,
    passes,
    passes_by_width,
    passes_of_rows,
    taken,
)

aten = torch.ops.aten


def _partial_gradients(
    rows: int, columns: int, parameters: Sequence[torch.Tensor], card: CardTraits
) -> tuple[int, ...]:
    """Returns the program of the partial gradients of a norm's parameters, where the rows are many and short.

    Source: ``LaunchGammaBetaBackwardCUDAKernel`` in aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    if rows <= 64 * 1024 or columns // 32 >= card.multiprocessors // 2:
        return ()
    blocks = min(32 * 1024 // math.ceil(columns / 32), math.ceil(rows / 32))
    return tuple(blocks * columns * parameter.itemsize for parameter in parameters)


def _copy_first(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a norm over rows, with a contiguous copy first."""
    return *taken(copied(args[0])), RESULTS


def _layer_norm_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    grad, x, normalized_shape, _, _, weight, bias, output_mask = args[:8]
    columns = math.prod(normalized_shape)
    rows = x.numel() // columns if columns else 0
    parameters = [each for each, wanted in zip((weight, bias), output_mask[1:], strict=True) if wanted]
    partials = _partial_gradients(rows, columns, [each for each in parameters if each is not None], card)
    return *taken(copied(x)), RESULTS, *taken(copied(grad)), *partials


def _rms_norm_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    grad, x, shape, _, weight, wanted = args[:6]
    columns = math.prod(shape)
    parameters = [weight] if weight is not None and wanted[1] else []
    partials = _partial_gradients(x.numel() // columns if columns else 0, columns, parameters, card)
    return *taken(copied(x)), RESULTS, *taken(copied(grad)), *partials


def _group_norm(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of scale and shift of every channel, in float32; for 16-bit inputs also of the statistics.

    Source: ``GroupNormKernelImplInternal`` in aten/src/ATen/native/cuda/group_norm_kernel.cu.
    """
    x, weight, bias, samples, channels, area, groups = args[:7]
    item = max(4, x.itemsize)
    statistics = samples * groups * item if x.itemsize < 4 else 0
    each = samples * channels * item if area > 1 and (weight is not None or bias is not None) else 0
    return *taken(_copied_image(x)), RESULTS, *taken(statistics, statistics, each, each)


def _group_norm_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the sums over every channel and every group, in float32.

    Source: ``GroupNormBackwardKernelImplInternal`` in aten/src/ATen/native/cuda/group_norm_kernel.cu.
    """
    grad, x, _, _, _, samples, channels, _, groups = args[:9]
    item = max(4, x.itemsize)
    channel, group = samples * channels * item, samples * groups * item
    return *taken(_copied_image(x), _copied_image(grad)), RESULTS, channel, channel, group, group, channel


def _copied_image(tensor: torch.Tensor) -> int:
    """Returns the bytes that ``contiguous(memory_format)`` allocates for the tensor's suggested memory format."""
    return 0 if has_channels_last(tensor) else copied(tensor)


def _batch_norm(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a batch's statistics in an unusual layout: a reduction, in float32.

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
    scratch = reduced(MOMENT, (wide, dims), moments, card)
    return RESULTS, *taken(0 if wide.dtype == x.dtype else wide.nbytes), *scratch


def _batch_norm_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the two sums over the rows, and of their partial sums, before the gradient of the batch.

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
    """Whether the batch is channels last; a matrix always is."""
    return has_channels_last(x) or (x.is_contiguous() and x.stride(1) == 1)


def _parts_of_rows(x: torch.Tensor, numbers: int) -> tuple[int, int]:
    """Returns the bytes of the partial results (`numbers` each) and of the semaphores of blocks that share a column.

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


def normalises_by_cudnn(image: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN normalises the batch: ``_batch_norm_impl_index`` in Normalization.cpp."""
    if not torch.backends.cudnn.enabled or image.dim() < 3 or torch.bfloat16 in (image.dtype, weight.dtype):
        return False
    return image.dtype != torch.float16 or weight.dtype == torch.float32


def _normed(x: torch.Tensor, normalized_shape: Sequence[int], weight: Any, eps: Any) -> tuple[torch.Tensor, ...]:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = [*x.shape[: x.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    return x.new_empty(x.shape), x.new_empty(rows, dtype=wide)


def _norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, shape: Any, rstd: Any, weight: Any, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    of_weight = weight.new_empty(weight.shape) if weight is not None and wanted[1] else None
    return x.new_empty(x.shape) if wanted[0] else None, of_weight


def _row_statistics(layout: ResultLayout, args: Sequence[Any], card: CardTraits | None) -> ResultLayout:
    """Returns the layout of a layer norm's results: statistics in CUDA's accumulation dtype, else in the weight's
    dtype.
    """
    if card is not None and args[0].dtype in _HALVES:
        return with_statistics(layout, torch.float32)
    # Under autocast the weight's dtype is not that of the input.
    return layout if args[2] is None else with_statistics(layout, args[2].dtype)


def _batch_statistics(layout: ResultLayout, args: Sequence[Any], card: CardTraits | None) -> ResultLayout:
    """Returns the layout of a batch norm's results.

    On a card the batch keeps its layout, since cuDNN gets contiguous or channels-last batches only. `batch_norm_cuda`
    allocates statistics in evaluation, too.
    """
    if card is None:
        layout = ordered_as(0)(layout, args, card)
        is_mixed = args[0].dtype in _HALVES and any(
            each is not None and each.dtype is torch.float32 for each in args[1:5]
        )
        return with_statistics(layout, torch.float32) if is_mixed else layout
    if args[0].dtype in _HALVES:
        layout = with_statistics(layout, torch.float32)
    if args[1] is not None and normalises_by_cudnn(*args[:2]):
        return layout
    return with_statistics(layout, layout.outputs[1].dtype, (args[0].shape[1],))


def _batch_gradient(layout: ResultLayout, args: Sequence[Any], card: CardTraits | None) -> ResultLayout:
    return ordered_as(1)(layout, args, card) if card is None else layout


_HALVES = (torch.float16, torch.bfloat16)


def _log_softmax_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``host_softmax_backward`` in aten/src/ATen/native/cuda/SoftMax.cu."""
    return RESULTS, *taken(copied(args[0]), copied(args[1]))


def _softmax_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the product of gradient and output, which the kernel takes in place of the gradient.

    Source: ``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu.
    """
    product = torch.mul(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in args[:2]))
    return RESULTS, *taken(product.nbytes, copied(product), copied(args[1]))


def _safe_softmax(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of ``_safe_softmax``: masks of infinite scores and of wholly infinite rows, and a zero.

    Source: ``_safe_softmax`` in aten/src/ATen/native/transformers/attention.cpp.
    """
    scores = args[0]
    return RESULTS, *taken(scores.numel(), scores.numel() // max(1, scores.size(args[1])), 4)


def _mean_loss(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the elementwise loss that a mean or a sum reduces, and of that reduction.

    Source: aten/src/ATen/native/BinaryOps.cpp and PointwiseOps.cpp, the structured kernels of these losses.
    """
    x = args[0]
    reduction = next((each for each in args[2:] if isinstance(each, int) and not isinstance(each, bool)), 1)
    if not reduction:
        return PLAIN
    each = torch.empty(torch.broadcast_shapes(x.shape, args[1].shape), dtype=x.dtype, device="meta")
    total = torch.empty((), dtype=x.dtype, device="meta")
    scratch = reduced(ALL_SUM, (each,), total, card)
    return RESULTS, each.nbytes, *scratch


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0)  # CPUs alone allocate a buffer


def _multi_margin_result(
    x: torch.Tensor, target: torch.Tensor, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    return x.new_empty(()) if reduction or x.dim() < 2 else x.new_empty(x.size(0))


def _margin_gradient(grad: torch.Tensor, x: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


RMS_NORM = aten._fused_rms_norm.default
_KEY = torch._C.DispatchKey
# The dispatch keys of a device tensor under a Python mode. Before torch 2.12 the mode needs PythonTLSSnapshot too.
_AS_ON_CUDA = functools.reduce(
    torch._C.DispatchKeySet.__or__,
    map(torch._C.DispatchKeySet, (_KEY.PythonTLSSnapshot, _KEY.AutogradIPU, _KEY.Python, _KEY.CPU)),
)


def _fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    other = weight is not None and weight.dtype != input.dtype
    if other or input.is_complex() or suggest_memory_format(input) is not torch.contiguous_format:
        composed: torch.Tensor = aten.rms_norm.default(input, normalized_shape, weight, eps)
        return composed
    normed: torch.Tensor = RMS_NORM.redispatch(_AS_ON_CUDA, input, normalized_shape, weight, eps)[0]
    return normed


def _fused_softmax(of: OpOverload, kernel: OpOverload) -> Callable[..., torch.Tensor]:
    """Returns a softmax that reads float16 and writes float32 in one CUDA kernel; a CPU casts its input first.

    Source: ``softmax`` and ``log_softmax`` in aten/src/ATen/native/SoftMax.cpp; bfloat16 is cast first on CUDA too.
    """

    def run(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        widens = dtype is torch.float32 and input.dtype is torch.float16
        found: torch.Tensor = kernel(input, dim, True) if widens else of(input, dim, dtype)
        return found

    return run


RULES = {
    "aten.native_layer_norm": OpRule(
        program=_copy_first, layout=_row_statistics, scratch="copies", time=passes_by_width((1.1, 640.0), (0.9, 400.0))
    ),
    "aten.native_layer_norm_backward": OpRule(
        program=_layer_norm_backward,
        scratch="copies",
        layout=ordered_as(),
        time=passes_by_width((2.5, 300.0), (1.9, 90.0)),
    ),
    "aten.rms_norm.default": OpRule(fused=_fused_rms_norm),
    "aten._fused_rms_norm": OpRule(program=_copy_first, results=_normed, time=passes(1.2, 1.2)),
    "aten._fused_rms_norm_backward": OpRule(program=_rms_norm_backward, results=_norm_gradients, time=passes(2.5, 2.0)),
    "aten.native_group_norm": OpRule(program=_group_norm, layout=ordered_as(0), time=passes(3.3, 2.1)),
    "aten.native_group_norm_backward": OpRule(program=_group_norm_backward, time=passes(3.7, 2.1)),
    "aten.native_batch_norm": OpRule(program=_batch_norm, layout=_batch_statistics, batched=1, time=passes(4.5, 1.95)),
    "aten._native_batch_norm_legit": OpRule(layout=_batch_statistics),
    "aten.native_batch_norm_backward": OpRule(
        program=_batch_norm_backward, layout=_batch_gradient, batched=2, time=passes(3.5, 2.7)
    ),
    "aten.softmax.int": OpRule(fused=_fused_softmax(aten.softmax.int, aten._softmax.default)),
    "aten.log_softmax.int": OpRule(fused=_fused_softmax(aten.log_softmax.int, aten._log_softmax.default)),
    "aten._softmax": OpRule(program=copy_after, scratch="copies", time=passes_of_rows(1.9, 1.7)),
    "aten._log_softmax": OpRule(program=copy_after, scratch="copies", time=passes_of_rows(1.8, 1.5)),
    "aten._softmax_backward_data": OpRule(program=_softmax_backward, scratch="copies", time=passes_of_rows(2.1, 1.9)),
    "aten._log_softmax_backward_data": OpRule(
        program=_log_softmax_backward, layout=ordered_as(), scratch="copies", time=passes_of_rows(1.3, 1.3)
    ),
    "aten._safe_softmax": OpRule(program=_safe_softmax, time=passes(3.2, 3.2)),
    # A loss reads one number of each row; its gradient depends on the targets only, not on the input's values.
    "aten.nll_loss_forward": OpRule(touches={"self": Touch.LOOK_UP}, scratch="copies"),
    "aten.nll_loss2d_forward": OpRule(order=(1, 0), touches={"self": Touch.LOOK_UP}, scratch="copies"),
    "aten.nll_loss_backward": OpRule(touches={"self": Touch.NOTHING}, scratch="copies"),
    "aten.nll_loss2d_backward": OpRule(touches={"self": Touch.NOTHING}, scratch="copies"),
    "aten.mse_loss": OpRule(program=_mean_loss, layout=whole_storage, batched=2),
    "aten.smooth_l1_loss": OpRule(program=_mean_loss, layout=whole_storage, batched=2),
    "aten.binary_cross_entropy": OpRule(program=_mean_loss, layout=whole_storage),
    "aten.huber_loss": OpRule(program=_mean_loss, batched=2),
    "aten.mse_loss_backward": OpRule(layout=ordered_as()),
    "aten.smooth_l1_loss_backward": OpRule(layout=ordered_as()),
    "aten.huber_loss_backward": OpRule(layout=ordered_as()),
    "aten.soft_margin_loss": OpRule(layout=whole_storage),
    "aten.multi_margin_loss": OpRule(results=_multi_margin_result),
    "aten.multi_margin_loss_backward": OpRule(results=_margin_gradient),
    "aten.log_sigmoid_forward": OpRule(results=_log_sigmoid, layout=ordered_as()),
    "aten.binary_cross_entropy_with_logits": OpRule(composed_on=("cuda",)),
}
