"""The rules of convolutions, and of other operators on images: patches, upsampling, rolls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from memscale.hardware import Work
from memscale.simulation.rules.cudnn_workspaces import Convolution
from memscale.simulation.rules.layouts import ResultLayout, in_order, ordered_as
from memscale.simulation.rules.reductions import SUM, reduced
from memscale.simulation.rules.rule import (
    CHANNELS_LAST,
    RESULTS,
    Arguments,
    Capability,
    CardTraits,
    OpRule,
    Program,
    Result,
    Time,
    briefly,
    copied,
    copy_after,
    has_channels_last,
    in_halves,
    most_held,
    passes,
    taken,
)


def _in_one_format(*images: torch.Tensor) -> list[int]:
    """Returns the bytes of the copies of `images` (and kernels) in one format: channels last if one of them has it.

    Source: ``cudnn_conv_suggest_memory_format`` in aten/src/ATen/native/ConvUtils.h.
    """
    if not any(map(has_channels_last, images)):
        return [copied(image) for image in images]
    kept = CHANNELS_LAST[images[0].dim()]
    return [0 if image.is_contiguous(memory_format=kept) else image.nbytes for image in images]


def _as_forward_had(grad: torch.Tensor, image: torch.Tensor, kernel: torch.Tensor, *, with_weight: bool) -> list[int]:
    """Returns the bytes of the copies of the image and of the gradient in the format of the forward pass.

    The image is copied only for the weight's gradient. A gradient in another format, as after a permute, is copied.

    Source: ``determine_backend_memory_format`` in aten/src/ATen/native/Convolution.cpp.
    """
    copy, _ = _in_one_format(image, kernel)
    if not any(map(has_channels_last, (image, kernel))):
        return [copy * with_weight, copied(grad)]
    kept = CHANNELS_LAST[grad.dim()]
    return [copy * with_weight, 0 if grad.is_contiguous(memory_format=kept) else grad.nbytes]


def _convolution(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``_convolution`` in aten/src/ATen/native/Convolution.cpp, and Conv_v8.cpp."""
    if without_cudnn(args, card.capability):
        copies = taken(copied(args[0]), copied(args[1]))
        if args[8] > 1 and by_products(args):
            return *copies, *_in_groups(args), RESULTS
        return *copies, RESULTS, *taken(_columns(args))
    image, kernel = _in_one_format(*args[:2])
    result = args[0].new_empty(_result_shape(args), device="meta")
    return *taken(image), RESULTS, *taken(kernel, _convolved(args, result).result_bytes(card.capability))


def _in_groups(args: Sequence[Any]) -> Program:
    """Returns the program of PyTorch's own grouped convolution: each group on a copy of its channels, then the joined
    result.

    Source: ``_convolution`` and ``subtensor`` in aten/src/ATen/native/Convolution.cpp.
    """
    groups, result = args[8], math.prod(_result_shape(args)) * args[0].itemsize
    image = args[0].nbytes // groups
    each = image, result // groups, *briefly(_columns(args)), -image
    return each * int(groups)


def _convolved(args: Sequence[Any], result: torch.Tensor) -> Convolution:
    image, kernel, _, stride, padding, _, transposed, _, groups = args
    last = has_channels_last(image) or has_channels_last(kernel)
    small, large = (image, result) if transposed else (result, image)
    return Convolution(large, kernel, small, tuple(stride), tuple(padding), groups, last)


def _result_shape(args: Sequence[Any]) -> tuple[int, ...]:
    image, kernel, _, stride, padding, dilation, transposed, output_padding, groups = args
    places = []
    for dim, size in enumerate(image.shape[2:]):
        step, pad, spread, more = (
            each[min(dim, len(each) - 1)] for each in (stride, padding, dilation, output_padding)
        )
        reach = spread * (kernel.shape[2 + dim] - 1)
        convolved = (size + 2 * pad - reach - 1) // step + 1
        places.append((size - 1) * step - 2 * pad + reach + more + 1 if transposed else convolved)
    return image.size(0), kernel.size(1) * groups if transposed else kernel.size(0), *places


def without_cudnn(args: Sequence[Any], capability: Capability) -> bool:
    """Whether PyTorch convolves ``args`` (image, weight, ...) by itself: cuDNN is off, or lacks kernels for the dtype.

    cuDNN has no bfloat16 kernels before sm_80.

    Source: ``ConvParams::use_cudnn`` in aten/src/ATen/native/Convolution.cpp.
    """
    return not torch.backends.cudnn.enabled or (args[0].dtype is torch.bfloat16 and capability < (8, 0))


def by_products(args: Sequence[Any]) -> bool:
    """Whether PyTorch's own kernel convolves by matrix products; depthwise convolutions go channel by channel."""
    return not args[8] == args[0].size(1) > 1


def _channel_by_channel(args: Sequence[Any]) -> bool:
    """Whether PyTorch's own depthwise kernel runs, which begins with the weight's gradient; float16 goes to cuDNN.

    Source: ``conv_depthwise2d_backward_cuda_out`` in aten/src/ATen/native/cuda/DepthwiseConv2d.cu.
    """
    image, weight, _, _, _, _, transposed, _, groups = args
    if transposed or image.dim() > 4 or image.dtype is torch.float16 or has_channels_last(image):
        return False
    return bool(groups == image.size(1) > 1 and not weight.size(0) % groups)


def _columns(args: Sequence[Any]) -> int:
    """Returns the bytes of the patches of one image, as PyTorch's own convolution lays them out for a matrix product.

    Source: ``slow_conv2d_forward`` in aten/src/ATen/native/cuda/ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu.
    """
    image, weight, _, stride, padding, _, transposed, *_ = args
    kernel = weight.shape[2:]
    is_product = not transposed and all(size == 1 for size in (*kernel, *stride)) and not any(padding)
    if is_product or not by_products(args):
        return 0
    places = (image.shape if transposed else _result_shape(args))[2:]
    return int(weight.size(1) * math.prod(kernel) * math.prod(places) * image.itemsize)


def _convolution_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the backward: the gradients of image and weight with their workspaces, and the bias's sum.

    Source: ``convolution_backward`` in aten/src/ATen/native/Convolution.cpp, ``cudnn_convolution_backward`` in
    ConvShared.cpp.
    """
    grad, wanted = args[0], args[-1]
    given = (*args[1:3], None, *args[4:10])  # the forward's arguments; the backward has the bias's sizes there
    of_bias: Program = ()
    if wanted[2]:
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        bias = torch.empty(grad.size(1), dtype=grad.dtype, device="meta")
        of_bias = Result(2), *briefly(*reduced(SUM, (grad, dims), bias, card))
    # The copies are contiguous: a gradient after a cat is a view among others.
    copies: tuple[int, ...] = taken(*map(copied, args[:3]))
    if without_cudnn(given, card.capability):
        of_image = of_weight = _columns(given)
        if args[9] > 1 and by_products(given):
            return *copies, *_groups_backward(args, of_image), *map(Result, range(3))
    else:
        copies, convolved = taken(*_as_forward_had(*args[:3], with_weight=wanted[1])), _convolved(given, grad)
        of_image = convolved.result_bytes(card.capability) if args[7] else convolved.image_bytes(card.capability)
        of_weight = convolved.weight_bytes(card.capability, card.multiprocessors)
    parts: list[Program] = [(Result(0), *briefly(of_image * wanted[0])), (Result(1), *briefly(of_weight * wanted[1]))]
    if _channel_by_channel(given):
        parts.reverse()
    return *copies, *parts[0], *parts[1], *(-nbytes for nbytes in reversed(copies)), *of_bias


def _groups_backward(args: Sequence[Any], columns: int) -> Program:
    """Returns the program of the gradients of each group, on copies of its channels; the joined gradients come last.

    Source: ``convolution_backward`` in aten/src/ATen/native/Convolution.cpp.
    """
    (grad, image, weight), groups, wanted = args[:3], args[9], args[-1]
    bias = grad.size(1) * grad.itemsize
    copies = image.nbytes // groups, grad.nbytes // groups
    sizes = (image.nbytes, weight.nbytes, bias)
    made = taken(*(size // groups for size, is_wanted in zip(sizes, wanted, strict=True) if is_wanted))
    each = *copies, *made, *briefly(columns), *(-nbytes for nbytes in reversed(copies))
    return each * int(groups)


def _flops_backward(given: Arguments, results: Any) -> int:
    """Returns the FLOPs of the gradients of image and weight, each as many as the forward's."""
    batch, _, *places = (given["input"] if given["transposed"] else given["grad_output"]).shape
    return int(2 * batch * math.prod(places) * math.prod(given["weight"].shape) * sum(given["output_mask"][:2]))


# Measured on 297 convolutions and the steps of ResNet-50, ViT, Swin and ConvNeXt (`benchmarks/bench_operators.py
# --convolutions`): few channels, or groups of few channels, use a small part of the tensor cores.


class _Shares(NamedTuple):
    """The shares of the rate of matrix products that the three kernels of a convolution reach.

    Attributes:
        result: the share of the forward pass.
        image: the share of the gradient of the image.
        weight: the share of the gradient of the weight.
    """

    result: float
    image: float
    weight: float


# Measured on all other convolutions, by the same run.
_USUAL = _Shares(0.4, 0.3, 0.3)
# For at most `_FEW` channels (RGB images, patch embeddings), in 16 and in 32 bits.
_FEW = 8
_OF_FEW = _Shares(0.048, 0.024, 0.054), _Shares(0.076, 0.042, 0.078)
# For groups, as shares of the rate without tensor cores; the second pair for the channels-last layout (ConvNeXt).
_OF_GROUPS = _Shares(0.05, 0.04, 0.024), _Shares(0.06, 0.045, 0.024)
_OF_LAST_GROUPS = _Shares(0.2, 0.1, 0.2), _Shares(0.1, 0.09, 0.007)


def _time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Returns `work` with as many FLOPs as take the convolution's time at the rate of matrix products.

    >>> image, kernel = torch.empty(64, 96, 56, 56, device="meta"), torch.empty(96, 1, 7, 7, device="meta")
    >>> call = (image, kernel, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 96)
    >>> _time(call, Work(2 * image.numel() * 49, 2 * image.nbytes, "tfloat32"), CardTraits((9, 0))).dtype
    'float32'
    """
    is_backward = len(args) > 9
    image, kernel = args[1:3] if is_backward else args[:2]
    transposed, groups = (args[7], args[9]) if is_backward else (args[6], args[8])
    at = 0 if in_halves(work) else 1
    shares = _OF_FEW[at] if kernel.shape[0 if transposed else 1] < _FEW else _USUAL
    if groups > 1:
        last = not image.is_contiguous() and image.stride(1) == 1
        shares = (_OF_LAST_GROUPS if last else _OF_GROUPS)[at]
        work = work._replace(dtype="float32")
    if not is_backward:
        return work._replace(flops=round(work.flops / shares.result))
    wanted = [share for share, is_wanted in zip(shares[1:], args[10], strict=False) if is_wanted]
    each = work.flops / max(1, len(wanted))
    return work._replace(flops=round(sum(each / share for share in wanted)))


def _with_copies(program: Callable[..., Program]) -> Time:
    """Returns the time of a convolution with the copies that its kernel makes first, which are read and written."""

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        found, copied = _time(args, work, card), most_held(program(args, None, card))
        return found._replace(launches=1, extra_bytes=2 * copied) if copied else found

    return time


def _of_forward(args: Sequence[Any]) -> Sequence[Any]:
    """Returns the arguments from the image on."""
    return args[1:] if len(args) > 9 else args


def _multiplies(args: Sequence[Any], card: CardTraits) -> bool:
    """Whether PyTorch's own kernel runs, by products of cuBLAS."""
    return without_cudnn(_of_forward(args), card.capability) and by_products(_of_forward(args))


def _lies(layout: ResultLayout, args: Sequence[Any], card: CardTraits | None) -> ResultLayout:
    """Returns the layout of the results: contiguous for PyTorch's own kernels.

    The depthwise kernel keeps channels last while cuDNN is enabled.
    """
    if card is None or not without_cudnn(_of_forward(args), card.capability):
        return layout
    keeps = torch.backends.cudnn.enabled and not by_products(_of_forward(args))
    return layout if keeps else in_order(layout, torch.contiguous_format)


_BOTH = OpRule(layout=_lies, uses_cublas=_multiplies)


def _patches(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Source: ``im2col_cuda``, which makes the result as large as the image, and then grows it."""
    image = args[0].numel() * args[0].itemsize
    return *taken(image, copied(args[0])), RESULTS


def _roll(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of ``roll``, which copies once for each dimension.

    Source: ``roll_cuda`` in aten/src/ATen/native/cuda/TensorTransformations.cu.
    """
    return *taken(copied(args[0]), args[0].nbytes if len(args[2]) > 1 else 0), RESULTS


def _as_large_as_columns(layout: ResultLayout, args: Sequence[Any], card: CardTraits | None) -> ResultLayout:
    """Source: ``col2im_cuda`` and ``col2im_cpu``, which make the result as large as the argument and shrink it."""
    columns = args[0].numel() * args[0].itemsize
    return replace(layout, storage_bytes=(max(columns, *layout.storage_bytes, 0),))


# On a CPU images are converted to channels last and back; the backward also receives the shape of the input.
_UPSAMPLINGS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")

RULES = {
    "aten.convolution": replace(_BOTH, program=_convolution, time=_with_copies(_convolution), batched=1),
    "aten.convolution_backward": replace(
        _BOTH,
        program=_convolution_backward,
        flops=_flops_backward,
        time=_with_copies(_convolution_backward),
        batched=2,
    ),
    "aten.im2col": OpRule(program=_patches),
    "aten.col2im": OpRule(program=copy_after, layout=_as_large_as_columns),
    "aten.roll": OpRule(program=_roll, time=passes(4.4, 3.0)),
    **{f"aten.upsample_{how}{back}": OpRule(batched=1) for how in _UPSAMPLINGS for back in ("", "_backward")},
    "aten.upsample_nearest2d": OpRule(batched=1, time=passes(2.9, 1.8)),
    "aten.upsample_nearest2d_backward": OpRule(program=copy_after, batched=1, time=passes(1.8, 1.2)),
    "aten.upsample_bilinear2d_backward": OpRule(program=copy_after, batched=1),
    "aten.avg_pool2d": OpRule(scratch="copies", time=passes(3.1, 1.7)),
    "aten.avg_pool2d_backward": OpRule(scratch="copies", time=passes(9.7, 5.3)),
    "aten.max_pool2d_with_indices": OpRule(scratch="copies", time=passes(2.5, 1.6)),
    "aten.max_pool2d_with_indices_backward": OpRule(scratch="copies", time=passes(5.0, 3.2)),
    "aten.channel_shuffle": OpRule(layout=ordered_as(0)),
    "aten.max_unpool2d": OpRule(layout=ordered_as(0)),
    "aten.replication_pad2d_backward": OpRule(layout=ordered_as(1)),
    "aten.affine_grid_generator": OpRule(composed_on=("cuda",)),
}
