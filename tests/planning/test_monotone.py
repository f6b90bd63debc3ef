"""More never makes a plan slower, neither more techniques nor more budget."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.planning import taken_bytes

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


CASES = {
    # Blocks that wait for one link and keep each other's inputs.
    "row": (lambda: nn.Sequential(*row(6, 512)), lambda: torch.zeros(8192, 512, device="meta"), square, 0.7),
    "logits": (Language, lambda: torch.zeros(4, 2048, dtype=torch.long, device="meta"), likelihood, 0.3),
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
        ("row", ENDS),
        pytest.param("row", tuple(CONFIGS), marks=pytest.mark.deep),
        pytest.param("logits", tuple(CONFIGS), marks=pytest.mark.deep),
    ],
    ids=["row-ends", "row", "logits"],
)
def test_more_techniques_are_never_slower(name, sets):
    make, batch, loss, share = CASES[name]
    with torch.device("meta"):
        model = make()
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": loss, "hardware": "rtx-4090"}
    engines = {names: ms.DecisionEngine(model, batch(), config=CONFIGS[names], **step) for names in sets}
    budget = int(share * taken_bytes(next(iter(engines.values())).plain))
    found = {names: seconds(engine, budget) for names, engine in engines.items()}
    assert any(each < float("inf") for each in found.values())
    for more, fewer in itertools.permutations(sets, 2):
        if set(fewer) < set(more):
            assert found[more] <= CLOSE * found[fewer], (more, fewer)
