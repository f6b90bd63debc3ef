"""More never makes a plan slower, neither more techniques nor more budget, nor does choosing by hand beat it."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.core import internals
from tests.support.coverings import DEEP

CONFIGS = {
    names: ms.Config(
        enable_checkpointing="checkpoint" in names, enable_tiling="tile" in names, enable_offloading="offload" in names
    )
    for size in (1, 2, 3)
    for names in itertools.combinations(("checkpoint", "tile", "offload"), size)
}
# A choice is made to a tenth of a percent of the best.
CLOSE = 1 + 1e-3


class Language(nn.Module):
    """Logits that are far larger than all else, which an allocator keeps much memory beside."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32_000, 128)
        self.blocks = nn.Sequential(*row(2, 128))
        self.lm_head = nn.Linear(128, 32_000, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.embed(tokens)))


def row(count, width):
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)]


def square(output, _):
    return output.square().mean()


def likelihood(output, tokens):
    return F.cross_entropy(output.flatten(0, 1), tokens.flatten())


def long_batch():
    return torch.zeros(8192, 512, device="meta")


CASES = {
    # Blocks that wait for one link and keep each other's inputs.
    "short row": (lambda: nn.Sequential(*row(2, 512)), long_batch, square, 0.7, "rtx-4090"),
    "row": (lambda: nn.Sequential(*row(6, 512)), long_batch, square, 0.7, "rtx-4090"),
    "logits": (Language, lambda: torch.zeros(4, 2048, dtype=torch.long, device="meta"), likelihood, 0.3, "rtx-4090"),
}


def seconds(engine, budget):
    try:
        return engine.plan(budget).evidence.planned.step_seconds
    except ms.BudgetError:
        return float("inf")


ENDS = (("offload",), ("checkpoint", "tile", "offload"))


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("short row", ENDS),
        pytest.param("row", tuple(CONFIGS), marks=pytest.mark.deep),
        pytest.param("logits", tuple(CONFIGS), marks=pytest.mark.deep),
    ],
    ids=["short row-ends", "row", "logits"],
)
def test_more_techniques_are_never_slower(name, sets):
    make, batch, loss, share, card = CASES[name]
    with torch.device("meta"):
        model = make()
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": loss, "hardware": card}
    engines = {names: ms.DecisionEngine(model, batch(), config=CONFIGS[names], **step) for names in sets}
    budget = int(share * next(iter(engines.values())).plain.taken_bytes)
    found = {names: seconds(engine, budget) for names, engine in engines.items()}
    assert any(each < float("inf") for each in found.values())
    for more, fewer in itertools.permutations(sets, 2):
        if set(fewer) < set(more):
            assert found[more] <= CLOSE * found[fewer], (more, fewer)


def step_of(seed):
    """A small step of any kind on any device, with any techniques."""
    drawn = random.Random(seed)
    kind = drawn.choice(["row", "language", "convolutions", "mixed"])
    device = drawn.choice(["rtx-4090", "h100", "t4", ms.Hardware(name="box", device_type="cpu", memory_bytes=2**36)])
    names = drawn.choice([names for names in CONFIGS if len(names) > 1 or "tile" not in names])
    width, count = drawn.choice([64, 128, 256]), drawn.choice([2, 4, 6])
    rows, size = drawn.choice([512, 2048]), drawn.choice([4, 16])
    with torch.device("meta"):
        if kind == "row":
            model, batch = nn.Sequential(*row(count, width)), torch.zeros(rows, width)
        elif kind == "language":
            model, batch = Language(), torch.zeros(size, 128, dtype=torch.long)
        elif kind == "convolutions":
            blocks = [[nn.Conv2d(16 if at else 3, 16, 3, padding=1), nn.BatchNorm2d(16)] for at in range(count)]
            model, batch = (
                nn.Sequential(*[nn.Sequential(*each, nn.ReLU()) for each in blocks]),
                torch.zeros(size, 3, 64, 64),
            )
        else:
            ends = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            model, batch = (
                nn.Sequential(ends[0], *row(count, 2 * width), ends[1], nn.LayerNorm(width)),
                torch.zeros(rows, width),
            )
    loss = likelihood if kind == "language" else square
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": loss, "hardware": device}
    return ms.DecisionEngine(model, batch, config=CONFIGS[names], **step)


SEEDS = range(60)
# Segments of 2 MiB: of seed 22 more budget was slower by 1.55, when each budget had a search of its own; of 52 by 1.15,
# when points of the grid further down were left out where the form with one candidate fits; of 25 by 1.17, when a
# search by bytes alone passed over faster steps that fit.
QUICK = (25,)


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.deep) for seed in SEEDS]
)
def test_more_budget_is_never_slower_whatever_an_allocator_makes_of_a_plan(seed):
    """Whole segments are reserved, copies are late, small steps wait for the host: no cost tells of that."""
    engine = step_of(seed)
    least, most = engine.smallest().evidence.planned.taken_bytes, engine.plain.taken_bytes
    parts = 8 if DEEP else 4
    times = [seconds(engine, least + (most - least) * at // parts) for at in range(parts + 1)]
    assert all(later <= CLOSE * earlier for earlier, later in itertools.combinations(times, 2))
    # Before torch 2.12 an allocator takes other blocks.
    assert seed not in QUICK or len(set(times)) > 1 or internals.TORCH_VERSION < (2, 12), "there is something to decide"


@pytest.mark.deep
def test_no_smallest_plan_takes_more_than_one_that_offloads_each_block():
    def block(stride):
        depthwise = nn.Conv2d(128, 128, 3, stride, padding=1, groups=128)
        wide = [nn.Conv2d(32, 128, 1), nn.BatchNorm2d(128), nn.SiLU(inplace=True), depthwise]
        return nn.Sequential(*wide, nn.BatchNorm2d(128), nn.SiLU(inplace=True), nn.Conv2d(128, 32, 1))

    with torch.device("meta"):
        model, batch = nn.Sequential(block(2), block(1), block(1)), torch.empty(64, 32, 112, 112)
    step = {"optimizer": torch.optim.SGD(model.parameters()), "loss": square, "hardware": "h100"}
    by_hand = ms.profile(model, batch, plan={"*": ms.offload()}, **step)
    smallest = ms.DecisionEngine(model, batch, **step).smallest()
    assert smallest.evidence.planned.taken_bytes <= by_hand.taken_bytes
    capped = ms.DecisionEngine(model, batch, config=ms.Config(mode="balanced", max_cpu_offload_gb=0), **step)
    assert not capped.smallest().evidence.by_tier
