"""What a convolution does with the allocator on a CUDA device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memscale.simulation.rules.cudnn_workspaces import Convolution
from memscale.simulation.rules.reductions import SUM, reduced
from memscale.simulation.rules.rule import (
    CHANNELS_LAST,
    RESULTS,
    Capability,
    CardTraits,
    OpRule,
    Program,
    Result,
    briefly,
    copied,
    has_channels_last,
    taken,
)


def _in_one_format(*images: torch.Tensor) -> list[int]:
    """What it takes to bring images and kernels into one format: channels last if one of them has it.

    Source: ``cudnn_conv_suggest_memory_format`` in aten/src/ATen/native/ConvUtils.h.
    """
    if not any(map(has_channels_last, images)):
        return [copied(image) for image in images]
    kept = CHANNELS_LAST[images[0].dim()]
    return [0 if image.is_contiguous(memory_format=kept) else image.nbytes for image in images]


def _as_forward_had(grad: torch.Tensor, image: torch.Tensor, kernel: torch.Tensor, *, with_weight: bool) -> list[int]:
    """What it takes to bring the image, which only the weight's gradient reads, and then the gradient into one format.

    That is the one of forward: a gradient that lies otherwise, after a permute, is copied.

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
        # A transposed one adds the bias as a product with ones.
        ones = math.prod(_result_shape(args)[2:]) * args[0].itemsize if args[6] and args[2] is not None else 0
        copies = taken(copied(args[0]), copied(args[1]))
        if args[8] > 1 and by_products(args):
            return *copies, *_in_groups(args, ones), RESULTS
        return *copies, RESULTS, *taken(_columns(args), ones)
    image, kernel = _in_one_format(*args[:2])
    result = args[0].new_empty(_result_shape(args), device="meta")
    return *taken(image), RESULTS, *taken(kernel, _convolved(args, result).result_bytes(card.capability))


def _in_groups(args: Sequence[Any], ones: int) -> Program:
    """PyTorch's own convolution of each group, out of a copy of its channels; the results are put together at the end.

    Source: ``_convolution`` and ``subtensor`` in aten/src/ATen/native/Convolution.cpp.
    """
    groups, result = args[8], math.prod(_result_shape(args)) * args[0].itemsize
    image = args[0].nbytes // groups
    each = image, result // groups, *briefly(_columns(args), ones), -image
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
    """Whether PyTorch convolves ``args`` (image, weight, ...) by itself: cuDNN is off, or has no such numbers.

    It has no bfloat16 before sm_80.

    Source: ``ConvParams::use_cudnn`` in aten/src/ATen/native/Convolution.cpp.
    """
    return not torch.backends.cudnn.enabled or (args[0].dtype is torch.bfloat16 and capability < (8, 0))


def by_products(args: Sequence[Any]) -> bool:
    """Whether its own kernel does so by matrix products, and not channel by channel."""
    return not args[8] == args[0].size(1) > 1


def _channel_by_channel(args: Sequence[Any]) -> bool:
    """Whether PyTorch's own kernel for that does it, which begins with the weight's gradient; float16 goes to cuDNN.

    Source: ``conv_depthwise2d_backward_cuda_out`` in aten/src/ATen/native/cuda/DepthwiseConv2d.cu.
    """
    image, weight, _, _, _, _, transposed, _, groups = args
    if transposed or image.dim() > 4 or image.dtype is torch.float16 or has_channels_last(image):
        return False
    return bool(groups == image.size(1) > 1 and not weight.size(0) % groups)


def _columns(args: Sequence[Any], *, always: bool = False) -> int:
    """The patches of one image of the batch, as PyTorch's own convolution lays them out for a matrix product.

    Source: ``slow_conv2d_forward`` in aten/src/ATen/native/cuda/ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu.
    """
    image, weight, _, stride, padding, _, transposed, *_ = args
    kernel = weight.shape[2:]
    is_product = not transposed and all(size == 1 for size in (*kernel, *stride)) and not any(padding)
    if (is_product and not always) or not by_products(args):
        return 0
    places = (image.shape if transposed else _result_shape(args))[2:]
    return int(weight.size(1) * math.prod(kernel) * math.prod(places) * image.itemsize)


def _convolution_backward(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """The gradient of the image, that of the weight, each with its workspace, and that of the bias, which is a sum.

    Source: ``convolution_backward`` in aten/src/ATen/native/Convolution.cpp, ``cudnn_convolution_backward`` in
    ConvShared.cpp.
    """
    grad, wanted = args[0], args[-1]
    given = (*args[1:3], None, *args[4:10])  # as forward takes them, which has a bias where this has its sizes
    of_bias: Program = ()
    if wanted[2]:
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        bias = torch.empty(grad.size(1), dtype=grad.dtype, device="meta")
        of_bias = Result(2), *briefly(*reduced(SUM, (grad, dims), bias, card))
    # Contiguous ones, of a gradient after a cat, say, which lies beside others.
    copies: tuple[int, ...] = taken(*map(copied, args[:3]))
    if without_cudnn(given, card.capability) and by_products(given):
        # The gradient of the image has the patches also where they are the image.
        columns = _columns(given, always=wanted[0])
        if args[9] > 1:
            return *copies, *_groups_backward(args, columns), *map(Result, range(3))
        return *copies, *_products_backward(columns, of_bias, is_transposed=args[7], with_image=wanted[0])
    of_image = of_weight = 0
    if not without_cudnn(given, card.capability):
        copies, convolved = taken(*_as_forward_had(*args[:3], with_weight=wanted[1])), _convolved(given, grad)
        of_image = convolved.result_bytes(card.capability) if args[7] else convolved.image_bytes(card.capability)
        of_weight = convolved.weight_bytes(card.capability, card.multiprocessors)
    parts: list[Program] = [(Result(0), *briefly(of_image * wanted[0])), (Result(1), *briefly(of_weight * wanted[1]))]
    if _channel_by_channel(given):
        parts.reverse()
    return *copies, *parts[0], *parts[1], *(-nbytes for nbytes in reversed(copies)), *of_bias


def _products_backward(columns: int, of_bias: Program, *, is_transposed: bool, with_image: bool) -> Program:
    """PyTorch's own. Source: ``slow_conv2d_backward_out_cuda`` and ``slow_conv_transpose2d_backward_cuda``."""
    if is_transposed:
        return Result(0), *briefly(columns * with_image), Result(1), *of_bias, *briefly(columns)
    if with_image:
        return Result(0), *taken(columns), *of_bias, Result(1)
    return *of_bias, Result(1), *taken(columns)


def _groups_backward(args: Sequence[Any], columns: int) -> Program:
    """The gradients of each group, out of copies of its channels; they are put together at the end.

    Source: ``convolution_backward`` in aten/src/ATen/native/Convolution.cpp.
    """
    (grad, image, weight), groups, wanted = args[:3], args[9], args[-1]
    bias = grad.size(1) * grad.itemsize
    copies = image.nbytes // groups, grad.nbytes // groups
    sizes = (image.nbytes, weight.nbytes, bias)
    made = taken(*(size // groups for size, is_wanted in zip(sizes, wanted, strict=True) if is_wanted))
    each = *copies, *made, *briefly(columns), *(-nbytes for nbytes in reversed(copies))
    return each * int(groups)


RULES = {
    "aten.convolution": OpRule(program=_convolution),
    "aten.convolution_backward": OpRule(program=_convolution_backward),
}
