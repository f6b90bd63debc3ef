"""What is on the menu: that which is left out there no search can find."""

import dataclasses

import torch
from torch import nn

import memscale as ms
from memscale.planning.engine import DecisionEngine
from tests.planning.test_plan import CPU
from tests.support.models import TransformerBlock


def test_batches_of_four_rows_are_cut_into_one_row_each_where_nothing_else_fits():
    """Pieces of two rows were the smallest: of four rows there was no plan with less than half a batch at once."""
    model = nn.Sequential(*[TransformerBlock(16, dropout=0.0) for _ in range(2)])
    batch = torch.ones(4, 8, 16)
    search = DecisionEngine(model, batch, loss=lambda y, _: y.square().mean(), hardware=CPU).searches[0]
    part = search.parts[0]
    single = (("", ms.tile(chunks=4)),)
    assert single not in [each.rules for each in search.menu.for_part(part, search.plain)]
    fine = dataclasses.replace(search.menu, fine=True)
    assert single in [each.rules for each in fine.for_part(part, search.plain)]


class _Loop(nn.Module):
    """Two blocks by turns, so many times."""

    def __init__(self, rounds):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])
        self.rounds = rounds

    def forward(self, x):
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return x


def test_what_runs_at_each_round_of_a_loop_is_not_cut():
    """Of two cells in 24 rounds the smallest plan took 28 s and not 5: pieces are many operators to simulate."""
    cut = []
    for rounds in (2, 9):
        step = {"loss": lambda y, _: y.square().mean(), "hardware": CPU}
        search = DecisionEngine(_Loop(rounds), torch.ones(16, 16), **step).searches[0]
        menu = search.menu.for_part(search.parts[0], search.plain)
        cut.append(any("tile" in candidate.techniques for candidate in menu))
        assert any("checkpoint" in candidate.techniques for candidate in menu)
    assert cut == [True, False]
