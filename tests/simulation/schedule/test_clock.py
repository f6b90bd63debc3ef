"""The schedule of a simulated step: what waits for what, for how long, and why."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.simulation.schedule.clock import CAUSES

CARD = ms.Hardware.named("h100")
SLOW = (63e9, 6e9, 5e8)  # bytes a second of the link


class Llama(nn.Module):
    """A quarter of the layers of Llama 8B, in their shapes."""

    def __init__(self, layers=8, width=4096, inner=14336, vocabulary=128256):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, width + width // 2, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        width = x.shape[-1]
        q, k, v = self.qkv(self.norm1(x)).split((width, width // 4, width // 4), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 128)).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def profiled(plan=None, *, card=CARD, tokens=(2, 4096), **shape):
    with torch.device("meta"):
        model = Llama(**shape).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = None if plan is None else {"layers.*": plan}
    return ms.profile(model, torch.zeros(tokens, dtype=torch.long), optimizer=optimizer, plan=plan, hardware=card)


def linked(rate):
    return dataclasses.replace(CARD, host_to_device_bytes_per_second=rate, device_to_host_bytes_per_second=rate)


def compute_seconds(profile):
    return profile.step_seconds - sum(profile.exposed_seconds.values())


def test_ten_gigabytes_out_and_back_take_their_time_on_the_link():
    plain, moved = profiled(), profiled(ms.offload())
    assert plain.exposed_seconds == {}
    assert plain.step_seconds < 0.3
    assert set(moved.by_tier) == {"pinned"}
    out, back = (sum(each.nbytes for each in moved.schedule.copies if each.direction == way) for way in ("out", "in"))
    assert moved.pinned_bytes >= out == back > 10e9
    assert moved.step_seconds >= max(0.4, (out + back) / 63e9)
    assert compute_seconds(moved) == pytest.approx(plain.step_seconds)
    assert {"input", "room"} <= set(moved.exposed_seconds)


SMALL = {"layers": 4, "width": 1024, "inner": 4096, "vocabulary": 4096, "tokens": (2, 1024)}


@pytest.mark.parametrize(
    "how",
    [
        ms.compose(ms.offload(), ms.checkpoint()),
        pytest.param(ms.offload(what="params"), marks=pytest.mark.deep),
        pytest.param(ms.offload(), marks=pytest.mark.deep),
        pytest.param(ms.offload(tier="disk"), marks=pytest.mark.deep),
    ],
    ids=repr,
)
def test_a_slower_link_never_makes_a_step_faster(how):
    found = [profiled(how, card=linked(rate), **SMALL) for rate in SLOW]
    for faster, slower in itertools.pairwise(found):
        assert slower.step_seconds >= faster.step_seconds
        assert sum(slower.exposed_seconds.values()) >= sum(faster.exposed_seconds.values())
        assert compute_seconds(slower) == pytest.approx(compute_seconds(faster))
        assert slower.peak_bytes == faster.peak_bytes
    for profile in found:
        assert set(profile.exposed_seconds) <= set(CAUSES)
        assert sum(profile.seconds_by_module.values()) == pytest.approx(profile.step_seconds)
