"""What is on the menu: that which is left out there no search can find."""

import torch
from torch import nn

from memscale.planning.engine import DecisionEngine
from tests.planning.test_plan import CPU


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
