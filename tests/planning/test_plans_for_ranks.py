"""Plans, predictions and tuning of a step that is one process's of several."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale as ms
from memscale.simulation import Parallel
from tests.support.hosts import QUICK_HOST

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),  # whose output nobody changes here
]

WIDTH, BLOCKS, ROWS = 256, 2, 4096
LOSS = {"loss": lambda y, _: y.square().mean()}
CARD = dataclasses.replace(ms.Hardware.named("a100-80"), name="card", memory_bytes=2**30, call_seconds=QUICK_HOST)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList([block() for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def made():
    with torch.device("meta"):
        model = Model()
    return model, {"optimizer": torch.optim.AdamW(model.parameters()), "hardware": CARD, **LOSS}


def batch(rows=ROWS):
    return torch.empty(rows, WIDTH, device="meta")


def test_a_plan_for_ranks_is_proved_by_their_step():
    model, step = made()
    ranks = {"parallel": "fsdp2", "world": 8}
    plain = ms.profile(model, batch(), **step, **ranks)
    budget = plain.reserved_peak_bytes * 8 // 10
    plan = ms.plan(model, batch(), budget=budget, **step, **ranks)
    assert plan
    assert plan.parallel == Parallel("fsdp2", 8)
    again = ms.profile(model, batch(), plan=plan, **step, **ranks)
    assert again.reserved_peak_bytes == plan.evidence.planned.taken_bytes <= budget
    assert again.step_seconds == plan.evidence.planned.step_seconds
    # The links between processes are in its time, and the parameters stay where FSDP2 has them.
    assert again.exposed_seconds["all-gather"] > 0
    assert "what='params'" not in repr(plan)
    assert "fsdp2 over 8 processes" in plan.to_python()
    found = type(plan).from_json(plan.to_json())
    assert (found, found.parallel) == (plan, plan.parallel)


def test_a_step_that_fits_as_it_is_says_for_whom():
    model, step = made()
    plan = ms.plan(model, batch(), budget=1.0, **step, parallel="fsdp2", world=64, shard="blocks.*")
    assert not plan
    assert plan.parallel == Parallel("fsdp2", 64, ("blocks.*",))
    assert ms.plan(model, batch(), budget=1.0, **step).parallel is None


def test_what_is_sharded_can_be_asked_for():
    model, step = made()
    ranks = {"parallel": "fsdp2", "world": 8}
    peaks = [ms.profile(model, batch(8), **step, **ranks, shard=shard).peak_bytes for shard in (None, ["blocks.*"], ())]
    assert peaks[0] == peaks[1] < peaks[2], "alone, the root gathers all at once"


MISTAKES = {
    "no module is called that": ({"parallel": "fsdp2", "world": 8, "shard": ["block.*"]}, "matches no module"),
    "shards of whole ones": ({"parallel": "ddp", "world": 8, "shard": ["blocks.*"]}, "ddp keeps every module whole"),
    "no pattern": ({"parallel": "fsdp2", "world": 8, "shard": [3]}, "takes patterns of module paths"),
    "no way": ({"world": 8}, "add parallel="),
}


@pytest.mark.parametrize(("ranks", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_before_anything_is_simulated(ranks, message):
    model, step = made()
    for ask in (
        lambda: ms.plan(model, batch(), budget=1.0, **step, **ranks),
        lambda: ms.frontier(model, batch(), **step, **ranks),
        lambda: ms.OOMPredictor(model, **step, **ranks),
        lambda: ms.AutoTuner(model, **step, **ranks),
    ):
        with pytest.raises(ms.ConfigError, match=message):
            ask()
