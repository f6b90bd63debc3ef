"""Times of operators on a card against what they took on an H100."""

import json
import math
from pathlib import Path

import pytest
import torch

from memscale.hardware import Hardware, work_of
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import CardTraits

H100 = Hardware.named("h100")
aten = torch.ops.aten


def predicted(op, *args):
    return Kernels(H100, probe=False).cost(op, args, work_of(op, args, {}, op(*args))).seconds(H100)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "microseconds"),
    [
        (empty(4096, 1600), empty(50304, 1600).t(), 877),
        (empty(4096, 1600), empty(50257, 1600).t(), 6737),  # GPT-2's vocabulary: rows that begin anywhere
        (empty(4096, 50257), empty(50257, 1600), 4952),
        (empty(50257, 4096), empty(4096, 1600), 820),
        (empty(16384, 768), empty(768, 30522), 3386),  # BERT's, which is even
        (empty(8192, 4096, dtype=torch.float32), empty(4096, 4096, dtype=torch.float32), 5370),
    ],
)
def test_products_by_where_their_rows_begin(left, right, microseconds):
    assert predicted(torch.ops.aten.mm.default, left, right) == pytest.approx(microseconds * 1e-6, rel=0.25)


@pytest.mark.parametrize(
    ("op", "args", "microseconds"),
    [
        (torch.ops.aten._log_softmax.default, (empty(8192, 128256), 1, False), 2735),
        (torch.ops.aten.native_layer_norm.default, (empty(8192, 4096), [4096], empty(4096), empty(4096), 1e-5), 69),
        (torch.ops.aten.gelu.default, (empty(8192, 4096),), 51),
    ],
)
def test_what_goes_over_its_numbers_more_than_once(op, args, microseconds):
    assert predicted(op, *args) == pytest.approx(microseconds * 1e-6, rel=0.12)


def conv(channels, width, kernel, groups=1, dtype=torch.float32, layout=torch.contiguous_format, backward=None):
    """A convolution of 128 images that keeps their width, or, backward, what it gives image and weight."""
    images = [empty(128, n, width, width, dtype=dtype).contiguous(memory_format=layout) for n in channels]
    weight = empty(channels[1], channels[0] // groups, kernel, kernel, dtype=dtype)
    rest = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    if backward is None:
        return aten.convolution.default, (images[0], weight, None, *rest)
    return aten.convolution_backward.default, (images[1], images[0], weight, None, *rest, [*backward, False])


LAST = torch.channels_last
# In steps of ViT-B, Swin-T (128 images, bfloat16), GPT-2 XL, Llama, T5 and BERT, ResNet-50 and ConvNeXt-T (float32, 128
# images) on an H100, so that some are cached.
VIT, BERT, SWIN = (25216, 768), (16384, 768), (128, 3136, 96)
SCORES = empty(16, 12, 512, 512, dtype=torch.float32)
HEADS = [empty(128, 12, 197, 64)] * 3
OF_STEPS = {
    "columns, ViT": (aten.sum.dim_IntList, (empty(*VIT), [0], True), 45),
    "columns, ViT, wide": (aten.sum.dim_IntList, (empty(25216, 3072), [0], True), 77),
    "columns, BERT": (aten.sum.dim_IntList, (empty(*BERT, dtype=torch.float32), [0], True), 45),
    "norm, ViT": (aten.native_layer_norm.default, (empty(*VIT), [768], empty(768), empty(768), 1e-5), 55),
    "norm, GPT-2": (aten.native_layer_norm.default, (empty(4096, 1600), [1600], empty(1600), empty(1600), 1e-5), 15.5),
    "a row for all": (aten.mul.Tensor, (empty(4, 2048, 2048), empty(2048)), 48),
    "a position for all": (aten.add.Tensor, (empty(128, 197, 768), empty(1, 197, 768)), 52),
    "heads to rows": (aten.clone.default, (empty(4, 32, 2048, 64).transpose(1, 2),), 53),
    "columns to rows": (aten.clone.default, (empty(8192, 4096).t(),), 260),
    "product, ViT": (aten.mm.default, (empty(*VIT), empty(768, 3072)), 173),
    "product, Llama": (aten.mm.default, (empty(4096, 4096), empty(4096, 14336)), 623),
    "product, float32": (
        aten.mm.default, (empty(*BERT, dtype=torch.float32), empty(768, 3072, dtype=torch.float32)), 1610,
    ),
    "attention, 197 tokens": (aten._scaled_dot_product_cudnn_attention.default, (*HEADS, None, True), 88),
    "norm, Swin": (aten.native_layer_norm.default, (empty(*SWIN), [96], empty(96), empty(96), 1e-5), 466),
    "rows of scores": (aten._softmax_backward_data.default, (SCORES, SCORES.clone(), -1, SCORES.dtype), 200),
    "of depths": (*conv((96, 96), 56, 7, groups=96, layout=LAST), 724),
    "of depths, backward": (*conv((96, 96), 56, 7, groups=96, layout=LAST, backward=(True, True)), 9980),
    "of depths, narrow": (*conv((192, 192), 28, 7, groups=192, layout=LAST, backward=(True, True)), 5114),
    "of rows and columns": (*conv((64, 64), 56, 3), 306),
    "moments": (aten._foreach_mul_.Scalar, ([empty(86_000_000)], 0.9), 148),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_STEPS)
def test_operators_of_steps(case):
    op, args, microseconds = OF_STEPS[case]
    assert predicted(op, *args) == pytest.approx(microseconds * 1e-6, rel=0.25)


CONVOLUTIONS = json.loads((Path(__file__).parents[3] / "benchmarks/results/convolutions-h100.json").read_text())["rows"]


def measured(row):
    """A measured convolution as calls, of the result and of the gradients of image and weight, with microseconds."""
    last = torch.channels_last if row["channels_last"] and len(row["image"]) == 4 else torch.contiguous_format
    image, kernel, result = (
        empty(*row[name], dtype=getattr(torch, row["dtype"])).contiguous(memory_format=last)
        for name in ("image", "kernel", "result")
    )
    dims = len(row["stride"])
    rest = (row["stride"], row["padding"], [1] * dims, row["transposed"], [0] * dims, row["groups"])
    yield aten.convolution.default, (image, kernel, None, *rest), row["result_us"]
    for name, mask in (("image", [True, False, False]), ("weight", [False, True, False])):
        yield aten.convolution_backward.default, (result, image, kernel, None, *rest, mask), row[f"{name}_us"]


@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "few channels"])
def test_convolutions_without_use_for_tensor_cores_take_what_they_took_in_sum(grouped):
    """Of 1.4 to 26 % of it they were said to take, before they had rates of their own."""
    said, took = 0.0, 0.0
    for row in CONVOLUTIONS:
        channels = row["kernel"][0 if row["transposed"] else 1]
        if (row["groups"] > 1) == grouped and (grouped or channels < 8) and math.prod(row["kernel"][2:]) > 1:
            for op, args, microseconds in measured(row):
                said += predicted(op, *args) * 1e6
                took += microseconds or 0.0
    assert said == pytest.approx(took, rel=0.2)


def test_before_hopper_rows_may_begin_anywhere():
    args = empty(64, 64), empty(64, 51)
    work = work_of(torch.ops.aten.mm.default, args, {}, torch.mm(*args))
    time = rule_of(torch.ops.aten.mm.default).time
    assert time(args, work, CardTraits((8, 0))) == work != time(args, work, CardTraits((9, 0)))
