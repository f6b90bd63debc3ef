"""Operators on images: patches, upsampling, rolls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memscale.simulation.rules.layouts import ResultLayout, ordered_as
from memscale.simulation.rules.rule import RESULTS, CardTraits, OpRule, Program, copied, copy_after, taken
from memscale.simulation.rules.times import passes


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
