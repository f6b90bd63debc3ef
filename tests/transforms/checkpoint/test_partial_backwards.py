"""Several backwards through the outputs of one region, some of which keep the graph."""

from __future__ import annotations

import itertools

import pytest
import torch

import memscale as ms
from tests.support.checks import bits


def gradients_after(region, schedule):
    """The gradient after each backward of `schedule`: (which output, whether it keeps the graph)."""
    weight = torch.linspace(-1, 1, 4).requires_grad_()
    outputs = region(torch.linspace(0, 2, 4) * 1.0, weight)
    found = []
    for output, retain_graph in schedule:
        outputs[output].backward(retain_graph=retain_graph)
        found.append(bits(weight.grad))
    return found


def two_outputs(x, w):
    return (x * w).sin().sum(), (x * w).exp().sum()


TURNS = list(itertools.product((0, 1), (False, True)))
# Every order of three backwards that plain autograd accepts: an output whose graph was freed is not asked again.
SCHEDULES = [
    schedule
    for schedule in itertools.product(TURNS, repeat=3)
    if all((output, False) not in schedule[:turn] for turn, (output, _) in enumerate(schedule))
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_order_of_backwards_gives_the_gradients_without_checkpoint(schedule):
    assert gradients_after(ms.checkpoint()(two_outputs), schedule) == gradients_after(two_outputs, schedule)


def test_a_freed_graph_is_still_refused():
    with pytest.raises(RuntimeError, match="retain_graph"):
        gradients_after(ms.checkpoint()(two_outputs), [(0, False), (1, True), (1, False), (1, False)])
