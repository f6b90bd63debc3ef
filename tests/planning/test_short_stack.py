"""Trials on a stack that most blocks are left out of: they show what trials on the whole stack show."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.planning import step_simulator
from memscale.planning.parts.short_stack import shortened
from memscale.planning.trials import trials

_BLOCKS = 20


class _Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(1024, 1024)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(_BLOCKS)
        )
        self.head = nn.Linear(1024, 16384)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _AddsOutside(_Stack):
    """What is outside of the blocks computes as often as there are blocks."""

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class _ByNumber(_Stack):
    def forward(self, x):
        x = self.stem(x)
        for number in range(_BLOCKS):
            x = self.blocks[number](x)
        return self.head(x)


def _head_costs(model):
    batch = torch.empty(8192, 1024, device="meta")
    only_tiles = ms.Config(mode="aggressive", enable_checkpointing=False, enable_offloading=False)
    optimizer = torch.optim.SGD(model.parameters())
    step = {"optimizer": optimizer, "loss": lambda y, _: y.logsumexp(-1).mean(), "config": only_tiles}
    found = ms.DecisionEngine(model, batch, hardware="h100", **step).searches[0].costs
    assert len(found.effects[-1]) == 4  # as it is, and in 4, 16 and 64 pieces
    return [(each.held_bytes.tolist(), each.slack_bytes.tolist(), each.seconds) for each in found.effects[-1]]


# One stack proves that the rows of blocks are independent. The first of three candidates for the head is tried while
# blocks try theirs, in one step; then one stack shows whether it tells of the whole, and the others have one each.
@pytest.mark.parametrize(
    ("kind", "stacks"),
    [(_Stack, 4), *(pytest.param(kind, 2, marks=pytest.mark.deep) for kind in (_AddsOutside, _ByNumber))],
)
def test_the_head_costs_what_it_costs_in_the_whole_stack(monkeypatch, kind, stacks):
    made = []
    monkeypatch.setattr(step_simulator, "shortened", lambda *given: made.append(given) or shortened(*given))
    with torch.device("meta"):
        model = kind()
    found = _head_costs(model)
    assert len(made) == stacks
    monkeypatch.setattr(trials, "left_out", lambda *_: frozenset())
    assert found == _head_costs(model)
    assert len(made) == stacks


class _FirstIsOther(_Stack):
    """The first block is wider than the others, and so a family of its own."""

    def __init__(self):
        super().__init__()
        self.blocks.insert(0, nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024)))


def test_a_block_like_no_other_costs_what_it_costs_in_the_whole_stack(monkeypatch):
    def costs(model):
        batch = torch.empty(8192, 1024, device="meta")
        step = {"optimizer": torch.optim.SGD(model.parameters()), "loss": lambda y, _: y.logsumexp(-1).mean()}
        found = ms.DecisionEngine(model, batch, hardware="h100", **step).searches[0].costs
        row = [part.path for part in found.parts].index("blocks.0")
        return [(each.held_bytes.tolist(), each.slack_bytes.tolist(), each.seconds) for each in found.effects[row]]

    made = []
    monkeypatch.setattr(step_simulator, "shortened", lambda *given: made.append(given) or shortened(*given))
    with torch.device("meta"):
        model = _FirstIsOther()
    found = costs(model)
    assert made
    monkeypatch.setattr(trials, "left_out", lambda *_: frozenset())
    assert found == costs(model)
