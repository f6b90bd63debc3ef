"""Times of operators on a card against what they took on an H100."""

import pytest
import torch

from memscale.hardware import Hardware, on_card, seconds, work_of

H100 = Hardware.named("h100")


def predicted(op, *args):
    result = op(*args)
    name = op._opname
    return seconds(on_card(name, args, work_of(op, args, {}, result), H100.capability), H100, op=name)


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


def test_before_hopper_rows_may_begin_anywhere():
    args = empty(64, 64), empty(64, 51)
    work = work_of(torch.ops.aten.mm.default, args, {}, torch.mm(*args))
    assert on_card("mm", args, work, (8, 0)) == work != on_card("mm", args, work, (9, 0))
