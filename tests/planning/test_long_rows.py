"""Plans of one long row: what works on each position alone is cut along it, several modules at once, norms too."""

import pytest
import torch
import transformers
from torch import nn

import memscale as ms
from memscale.planning.parts import candidates


def _llama(layers=3, width=64, dtype=torch.float32):
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 128),
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype)


def _tokens(count, device="cpu"):
    tokens = torch.arange(count, device=device).remainder(1000)[None]
    return {"input_ids": tokens, "labels": tokens}


def _by_hand(streams):
    along = ms.tile(chunks=4, in_dims=1, out_dims=1)
    around = ms.compose(ms.offload(), ms.checkpoint())
    return {
        "model.layers.*": ms.compose(ms.offload(what="params"), around) if streams else around,
        "model.layers.*.mlp": along,
        "model.layers.*.input_layernorm": along,
        "model.layers.*.post_attention_layernorm": along,
        "model.norm": along,
        "lm_head": ms.tile(chunks=64),
    }


@pytest.mark.deep
def test_a_plan_takes_no_more_than_what_one_writes_by_hand():
    """Where nothing is cut along the row the least is a fifth more, for the moment of a norm or of an MLP."""
    with torch.device("meta"):
        model, batch = _llama(width=512, dtype=torch.bfloat16), _tokens(2**17, "meta")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    hand = min(
        ms.profile(model, batch, optimizer=optimizer, hardware="h100", plan=ms.Plan(_by_hand(streams))).taken_bytes
        for streams in (False, True)
    )
    plan = ms.plan(model, batch, int(1.02 * hand), optimizer=optimizer, hardware="h100", exact=False)
    assert plan.evidence.planned.taken_bytes <= 1.02 * hand
    cut = {rule.pattern.rpartition(".")[2] for rule in plan if "tile" in repr(rule.transform)}
    assert cut >= {"mlp", "input_layernorm", "post_attention_layernorm"}


class Mixes(nn.Module):
    """A norm over positions, whose operators look like those of one of each position."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other, self.mlp = (
            Mixes(),
            nn.LayerNorm(8),
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)),
        )

    def forward(self, x):
        return x + self.mlp(self.other(self.norm(x)))


def test_what_mixes_positions_is_not_cut_along_them(monkeypatch):
    monkeypatch.setattr(candidates, "_MOST_POSITIONS", 16)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(1, 96, 8)
    engine = ms.DecisionEngine(
        model, x, loss=lambda y, _: y.square().mean(), config=ms.Config(mode="aggressive"), hardware="cpu"
    )
    (search,) = engine.searches.own
    mixes = [each for each in search.costs.rejected if any(inside == "norm" for inside, _ in each.rules)]
    assert mixes, "it was thought of, and the simulation refused it"
    assert not any(inside == "norm" for menu in search.costs.candidates for each in menu for inside, _ in each.rules)
