"""What candidates are thought to hold and to take, against steps in which they are put together."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.planning.engine import DecisionEngine
from tests.planning.test_plan import CPU, MODELS, Stages
from tests.support.hosts import QUICK_HOST
from tests.support.models import TransformerBlock


def _activated():
    """Each result is kept by its in-place activation and by the convolution behind it."""
    stages = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
        for a, b in ((3, 8), (8, 12), (12, 16), (16, 24), (24, 32))
    ]
    return nn.Sequential(*stages), torch.ones(4, 3, 24, 24)


class _Rounded(nn.Module):
    """Computes in float32 and passes bfloat16 on: only a checkpointed block keeps its input."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        hidden = nn.functional.layer_norm(x.float(), x.shape[-1:])
        return x + self.second(nn.functional.gelu(self.first(hidden))).to(x.dtype)


# Its kernels take time, and Python none: a part has a view more or less by what its neighbours do.
KERNELS = dataclasses.replace(CPU, flops_per_second={"float32": 1e12}, bandwidth_bytes_per_second=1e11)


def _searched(model, batch, loss=lambda output, _: output.square().mean(), hardware=CPU):
    optimizer = torch.optim.AdamW(model.parameters())
    step = {"optimizer": optimizer, "loss": loss, "hardware": hardware, "keeps_output": False}
    return DecisionEngine(model, batch, config=ms.Config(mode="aggressive"), **step).searches[0]


@pytest.mark.parametrize(
    ("make", "of_the_peak"),
    [
        pytest.param(lambda: (Stages(), torch.ones(4, 3, 32, 32)), 1e-6, marks=pytest.mark.deep),
        (_activated, 1e-6),
        pytest.param(lambda: (MODELS["blocks"][0](), MODELS["blocks"][1]()), 1e-6, marks=pytest.mark.deep),
    ],
    ids=["stages", "activated", "blocks"],
)
def test_a_choice_holds_what_was_thought(make, of_the_peak):
    """Also where two parts keep the same tensor, and in parts whose candidates others tried for them."""
    search = _searched(*make(), hardware=KERNELS)
    costs = search.costs
    random = np.random.default_rng(0)
    for _ in range(5):
        # Of groups of parts nothing is chosen: what they hold asks that their members are as they are.
        menus = costs.candidates[: len(costs.paths)]
        choice = (*(int(random.integers(0, len(menu))) for menu in menus), *[0] * (1 + len(costs.groups)))
        peak = search.prove(choice).profile.peak_bytes
        assert costs.held_bytes(choice).max() == pytest.approx(peak, rel=of_the_peak)
        assert costs.seconds(choice) == pytest.approx(search.prove(choice).seconds, rel=1e-9)


def test_a_candidate_is_charged_with_the_input_that_it_keeps():
    """In the trial step the block before, which made the input, tries a candidate too."""
    search = _searched(nn.Sequential(*[_Rounded(32) for _ in range(6)]), torch.ones(16, 8, 32).bfloat16())
    costs, random = search.costs, np.random.default_rng(0)
    for _ in range(12):
        menus = costs.candidates[: len(costs.paths)]
        choice = (*(int(random.integers(0, len(menu))) for menu in menus), *[0] * (1 + len(costs.groups)))
        peak = search.prove(choice).profile.peak_bytes
        assert peak <= costs.held_bytes(choice).max() <= 1.03 * peak


def test_blocks_that_are_cut_pass_on_one_gradient():
    """Each makes a tensor for it, in place of the one before it: as many as blocks would be a tenth of this peak."""
    search = _searched(nn.Sequential(*[TransformerBlock(32, dropout=0.0) for _ in range(5)]), torch.ones(16, 32, 32))
    costs = search.costs
    cut = [
        next(at for at, each in enumerate(menu) if str(each) == "tile(chunks=4)")
        for menu in costs.candidates[: len(costs.paths)]
    ]
    choice = (*cut, *[0] * (1 + len(costs.groups)))
    peak = search.prove(choice).profile.peak_bytes
    assert peak <= costs.held_bytes(choice).max() <= 1.03 * peak


@pytest.mark.deep
def test_without_an_optimizer_gradients_count_to_their_parts_too():
    """Plain SGD has no states and no temporaries, so that forward and backward hold what they hold without it."""
    labels = torch.zeros(256, dtype=torch.long)
    body = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    model, batch = nn.Sequential(*body, nn.Linear(32, 2048)), torch.ones(256, 32)
    step = {"loss": lambda y, _: nn.functional.cross_entropy(y, labels), "hardware": CPU}
    step["config"] = ms.Config(mode="aggressive")
    held = [
        DecisionEngine(model, batch, optimizer=optimizer, **step).searches[0].costs.effects
        for optimizer in (None, torch.optim.SGD(model.parameters()))
    ]
    for without, with_one in zip(*held, strict=True):  # of each part, and last of the head
        assert [each.held_bytes.tolist() for each in without] == [each.held_bytes[:-1].tolist() for each in with_one]


def test_a_tiled_head_takes_the_time_of_its_pieces():
    """They compute gradients in forward, which is no part of the update."""
    body = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    labels = torch.zeros(256, dtype=torch.long)
    search = _searched(
        nn.Sequential(*body, nn.Linear(32, 512)),
        torch.ones(256, 32),
        lambda y, _: nn.functional.cross_entropy(y, labels),
    )
    costs = search.costs
    tiled = next(at for at, each in enumerate(costs.candidates[-1]) if each.rules == (("2", ms.tile(chunks=64)),))
    choice = (*costs.as_it_is[:-1], tiled)
    assert costs.seconds(choice) == pytest.approx(search.prove(choice).seconds, rel=0.01)


@pytest.mark.deep
def test_small_parameters_that_stay_bring_no_states_of_streamed_ones_along():
    """A norm's weights are too small to move; the states of the matrices beside it move all the same.

    And once one block streams, the others are updated one parameter after the other.
    """
    blocks = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    with torch.device("meta"):
        model, batch = nn.Sequential(*blocks).to("meta"), torch.empty(64, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    card = dataclasses.replace(ms.Hardware.named("h100"), call_seconds=QUICK_HOST)
    loss = {"loss": lambda output, _: output.square().mean(), "hardware": card}
    search = DecisionEngine(model, batch, optimizer=optimizer, **loss).searches[0]
    costs = search.costs
    streamed = next(at for at, each in enumerate(costs.candidates[0]) if str(each) == "offload(what='params')")
    for rows in (1, 2, 4):
        choice = (*[streamed] * rows, *[0] * (4 - rows), 0)
        proven = search.prove(choice).profile.peak_bytes
        assert costs.held_bytes(choice).max() == pytest.approx(proven, rel=0.05)
        assert costs.seconds(choice) == pytest.approx(search.prove(choice).seconds, rel=0.25)
    assert proven < 0.5 * search.prove(costs.as_it_is).profile.peak_bytes
