"""What is on the menu: that which is left out there no search can find."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.planning.engine import DecisionEngine
from tests.planning.test_plan import CPU
from tests.support.models import TransformerBlock

ROUNDS = ms.Config(mode="aggressive")  # rows may be cut


class _Own(nn.Module):
    """Layers that its own code joins, beside a small part."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class _Recurring(nn.Module):
    """One block, three times."""

    def __init__(self):
        super().__init__()
        self.group = nn.ModuleList([TransformerBlock(16, dropout=0.0)])
        self.group[0].qkv = nn.Sequential(nn.Linear(16, 48), nn.Tanh())  # so that its children keep more than half

    def forward(self, x):
        for _ in range(3):
            x = self.group[0](x)
        return x


def _flat():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])


@pytest.mark.parametrize(
    ("make", "paths"), [(_flat, [""]), (_Own, [""]), (_Recurring, ["group.0"])], ids=["flat", "own code", "recurring"]
)
def test_what_its_own_code_makes_is_a_part_and_so_is_what_recurs(make, paths):
    """A flat MLP had no part at all, and no plan; of a block that recurs only its attention could be recomputed."""
    model, batch = make(), torch.ones(64, 8, 16)
    search = DecisionEngine(
        model, batch, loss=lambda y, _: y.square().mean(), hardware=CPU, config=ROUNDS
    ).searches.own[0]
    assert [part.path for part in search.parts] == paths
    rules = [each.rules for each in search.menu.for_part(search.parts[0], search.plain)]
    assert {(("", ms.checkpoint()),), (("", ms.tile(chunks=4)),)} <= set(rules)


def test_a_row_of_single_operations_is_cut_behind_convolutions():
    """None of its modules has anything to recompute, and as a whole it frees nothing: there was no plan for it."""
    layers = [[nn.Conv2d(8 if at else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()] for at in range(4)]
    model = nn.Sequential(nn.Sequential(*[each for layer in layers for each in layer]))
    batch = torch.ones(4, 3, 32, 32)
    engine = DecisionEngine(model, batch, loss=lambda y, _: y.square().mean(), hardware=CPU)
    plan = engine.plan(int(0.8 * engine.plain.peak_bytes))
    (rule,) = plan
    assert rule.transform.cuts
    assert plan.evidence.planned.taken_bytes <= plan.evidence.budget_bytes


def test_a_segment_of_a_convnet_begins_in_one_module_and_ends_in_the_next():
    """What a convolution gives is worth keeping, and is inside a module: plans ran every second one again, for 1.12."""

    def layer(cin, cout):
        return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))

    model = nn.Sequential(layer(3, 16), layer(16, 16), nn.MaxPool2d(2), layer(16, 32), layer(32, 32))
    engine = DecisionEngine(model, torch.ones(8, 3, 64, 64), loss=lambda y, _: y.square().mean(), hardware=CPU)
    plan = engine.plan(int(0.85 * engine.plain.peak_bytes))
    (rule,) = plan
    assert any(isinstance(cut, tuple) for cut in rule.transform.cuts)
    assert plan.evidence.planned.taken_bytes <= plan.evidence.budget_bytes
    assert plan.evidence.planned.step_seconds < 1.1 * plan.evidence.plain.step_seconds
