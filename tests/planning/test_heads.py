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
