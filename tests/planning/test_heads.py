"""A loss head in a module with layers of its own, as encoders have, is cut like one that stands alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms

WIDTH, WORDS = 32, 1024


class _Masked(nn.Module):
    """Words to words, through blocks and a head that transforms before it projects."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
        )
        transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.head = nn.Sequential(transform, nn.Linear(WIDTH, WORDS))

    def forward(self, words):
        return self.head(self.blocks(self.embedding(words)))


def _loss(logits, words):
    return F.cross_entropy(logits.flatten(0, -2), words.flatten())


@pytest.mark.deep
def test_the_projection_is_cut_though_its_module_could_be_recomputed():
    model, words = _Masked(), torch.zeros(8, 64, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters())
    config = ms.Config(enable_tiling=True)
    engine = ms.DecisionEngine(model, words, optimizer=optimizer, loss=_loss, hardware="cpu", config=config)
    recomputed = ms.profile(
        model, words, plan={"head": ms.checkpoint()}, optimizer=optimizer, loss=_loss, hardware="cpu"
    )
    plan = engine.plan(int(0.5 * recomputed.peak_bytes))
    assert next(str(rule.transform) for rule in plan if rule.pattern == "head.1").startswith("tile(")


class _Speaker(nn.Module):
    """Its step is largest in the middle of backward."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4 * WORDS, WIDTH), nn.Linear(WIDTH, 4 * WORDS, bias=False)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Softmax(-1), nn.Linear(64 * WIDTH, WIDTH)) for _ in "1"]
        )
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.blocks(self.embedding(words)))


@pytest.mark.deep
def test_the_gradient_of_a_tied_head_is_made_last_where_the_step_is_largest_in_between():
    model, words = _Speaker(), torch.zeros(1, 32, dtype=torch.long)
    step = {"optimizer": torch.optim.SGD(model.parameters()), "loss": _loss, "hardware": "cpu"}
    cuts = ms.Config(enable_tiling=True, enable_checkpointing=False, enable_offloading=False)
    plan = ms.DecisionEngine(model, words, config=cuts, stepping=["step_in_backward"], **step).smallest()
    assert next(rule.transform for rule in plan if rule.pattern == "head").late_gradient
