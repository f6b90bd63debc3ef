"""What `cast` does to FLOPs and bytes, alone and in every ordered pair with the others."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms

ROWS, WIDTH = 8, 16
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs of one projection of all rows
WIDE, HALF = 4 * ROWS * WIDTH, 2 * ROWS * WIDTH  # bytes of the rows in float32 and in bfloat16
WEIGHT = 2 * WIDTH * WIDTH  # bytes of one weight in bfloat16


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def effect(how):
    """(forward FLOPs, backward FLOPs, bytes of intermediate values kept) in units of one product and of bytes."""
    fn, x = how(block()), torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = fn(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    kept = sum(r.nbytes for r in ms.saved_residuals(fn, x) if r.source == "intermediate")
    return forward.get_total_flops() / PRODUCT, backward.get_total_flops() / PRODUCT, kept


cast, checkpoint, tile = ms.cast(), ms.checkpoint(), ms.tile(chunks=2)
# Plain: tanh's result, kept for itself and for the second product. Cast: that in half the bytes, the cast input and the
# two cast weights. Under a checkpoint a region keeps its input: as it came, or as the cast around it made it; the cast
# weights around a checkpoint live on, as what its function captures. A recompute repeats the first product only.
TABLE = {
    "identity": (ms.identity, (2, 4, WIDE)),
    "cast": (cast, (2, 4, HALF + HALF + 2 * WEIGHT)),
    "checkpoint(cast)": (ms.compose(checkpoint, cast), (2, 5, 0)),
    "cast(checkpoint)": (ms.compose(cast, checkpoint), (2, 5, HALF)),
    "tile(cast)": (ms.compose(tile, cast), (2, 5, 0)),
    "cast(tile)": (ms.compose(cast, tile), (2, 5, HALF)),
    "cast(cast)": (ms.compose(cast, cast), (2, 4, HALF + HALF + 2 * WEIGHT)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_effect_is_exactly(name):
    how, expected = TABLE[name]
    assert effect(how) == expected
