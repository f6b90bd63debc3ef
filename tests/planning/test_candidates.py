"""What is on the menu: that which is left out there no search can find."""

import torch
from torch import nn

import memscale as ms
from memscale.planning.engine import DecisionEngine
from tests.planning.test_plan import CPU
from tests.support.models import TransformerBlock


def test_batches_of_four_rows_are_cut_into_one_row_each_where_nothing_else_fits():
    """Pieces of two were the smallest, and a batch of four had no plan as small as a batch of eight has per row."""
    model = nn.Sequential(*[TransformerBlock(32, dropout=0.0) for _ in range(2)])
    batch = torch.ones(4, 256, 32)
    search = DecisionEngine(model, batch, loss=lambda y, _: y.square().mean(), hardware=CPU).searches[0]
    part = search.parts[0]
    single = (("", ms.tile(chunks=4)),)
    assert single not in [each.rules for each in search.menu.for_part(part, search.plain)]
    assert search.finer is not None
    assert single in [each.rules for each in search.finer.menu.for_part(part, search.plain)]
    among = frozenset({"checkpoint", "tile"})
    assert search.smallest(among).taken_bytes < min(each.taken_bytes for each in search._small_ones(among).values())
