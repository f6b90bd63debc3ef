"""Model configurations of twelve families, on ``meta``, drawn by a seed: what a policy is trained and judged on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, ...]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, a batch for it, a loss and how it steps."""

    family: str
    name: str
    model: nn.Module
    batch: Batch
    loss: Loss
    optimizer: torch.optim.Optimizer | None


class Block(nn.Module):
    """Attention (with grouped heads if asked, across another sequence if given one) and an inner layer."""

    def __init__(self, width: int, heads: int, groups: int, causal: bool, experts: int = 0, gated: bool = False):
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        each = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * each)
        self.out = nn.Linear(width, width)
        inner = [Inner(width, gated) for _ in range(max(1, experts))]
        self.inner = nn.ModuleList(inner)
        self.router = nn.Linear(width, experts) if experts else None

    def forward(self, x, other=None):
        rows, length, width = x.shape
        h = self.norm1(x)
        source = h if other is None else other
        q = self.q(h).view(rows, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(source).view(rows, source.shape[1], 2 * self.groups, -1).transpose(1, 2).chunk(2, dim=1)
        if self.groups != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and other is None)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        h = self.norm2(x)
        if self.router is None:
            return x + self.inner[0](h)
        shares = self.router(h).softmax(-1)
        parts = h.chunk(len(self.inner), dim=1)  # each expert its share of the tokens
        mixed = torch.cat([expert(part) for expert, part in zip(self.inner, parts, strict=True)], dim=1)
        return x + mixed * shares.amax(-1, keepdim=True)


class Inner(nn.Module):
    def __init__(self, width: int, gated: bool):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if gated else None

    def forward(self, x):
        h = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(h)


class Language(nn.Module):
    def __init__(self, vocabulary, width, blocks, tied):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class Translation(nn.Module):
    def __init__(self, vocabulary, width, heads, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList([Block(width, heads, heads, False) for _ in range(layers)])
        self.decoder = nn.ModuleList([Block(width, heads, heads, True) for _ in range(layers)])
        self.across = nn.ModuleList([Block(width, heads, heads, False) for _ in range(layers)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        memory = x = self.embed(tokens)
        for block in self.encoder:
            memory = block(memory)
        for block, across in zip(self.decoder, self.across, strict=True):
            x = across(block(x), memory)
        return self.lm_head(x)


class Vision(nn.Module):
    def __init__(self, width, heads, layers, classes=1000):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList([Block(width, heads, heads, False) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


class Convolutional(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(layers)])
        self.head = nn.Linear(width, 1000)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.up = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images):
        x, kept = self.stem(images), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = block(F.interpolate(x, scale_factor=2) + kept.pop())
        return self.last(x)


class Recurrent(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(layers)])
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.lm_head(x)


class Recommender(nn.Module):
    def __init__(self, rows, width, tables, layers):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        inner = width * tables
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(inner, inner), nn.ReLU()) for _ in range(layers)])
        self.head = nn.Linear(inner, 1)

    def forward(self, ids):
        found = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.head(self.layers(torch.cat(found, dim=1)))


class Scan(nn.Module):
    """A gated depthwise convolution with a cumulative sum: the memory of a state-space block, in a few operators."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x):
        a, gate = self.into(self.norm(x)).chunk(2, dim=-1)
        a = F.silu(self.conv(a.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return x + self.out(torch.cumsum(a, dim=1) * F.silu(gate))


class Plain(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(x))


FAMILIES = (
    "gpt", "llama", "encoder", "encoder_decoder", "vit", "convnet", "unet", "moe", "lstm", "recommender",
    "state_space", "mlp",
)  # fmt: skip


def subject(family: str, seed: int) -> Subject:
    """The configuration of a family that a seed draws."""
    draw = random.Random(f"{family} {seed}")
    width = draw.choice([256, 512, 1024, 2048, 4096, 8192])
    heads = max(4, width // 64)
    layers = draw.choice([2, 4, 6, 8] * 6 + [24, 64])  # blocks that are alike say little more by being many
    vocabulary = draw.choice([8_000, 32_000, 128_000])
    rows, length = draw.choice([(32, 256), (8, 1024), (2, 4096), (16, 2048)])
    with torch.device("meta"):
        tokens = torch.zeros(rows, length, dtype=torch.long)
        side = draw.choice([128, 256])
        images = torch.zeros(rows, 3, side, side)
        if family == "gpt":
            blocks = [Block(width, heads, heads, True) for _ in range(layers)]
            model, batch = Language(vocabulary, width, blocks, draw.random() < 0.5), tokens
        elif family == "llama":
            blocks = [Block(width, heads, heads // 4, True, gated=True) for _ in range(layers)]
            model, batch = Language(vocabulary, width, blocks, False), tokens
        elif family == "encoder":
            blocks = [Block(width, heads, heads, False) for _ in range(layers)]
            model, batch = Language(vocabulary, width, blocks, True), tokens
        elif family == "moe":
            blocks = [Block(width, heads, heads, True, experts=4) for _ in range(layers)]
            model, batch = Language(vocabulary, width, blocks, False), tokens
        elif family == "state_space":
            model, batch = Language(vocabulary, width, [Scan(width) for _ in range(layers)], True), tokens
        elif family == "encoder_decoder":
            model, batch = Translation(vocabulary, width, heads, layers // 2), tokens
        elif family == "vit":
            model, batch = Vision(width, heads, layers), images
        elif family == "convnet":
            model, batch = Convolutional(width // 8, layers), images
        elif family == "unet":
            model, batch = UNet(width // 8, min(layers, 4)), images
        elif family == "lstm":
            model, batch = Recurrent(vocabulary, width, max(2, layers // 2)), tokens
        elif family == "recommender":
            model = Recommender(vocabulary * 4, width // 4, 8, layers)
            batch = torch.zeros(rows * 256, 8, dtype=torch.long)
        else:
            model, batch = Plain(width, 2 * layers), torch.zeros(rows * length, width)
    how = draw.choice(["adamw", "adamw", "sgd", "none"])
    if draw.random() < 0.2:  # all but the last part frozen
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
    if draw.random() < 0.5:
        model = model.bfloat16()
        batch = batch if batch.dtype == torch.long else batch.bfloat16()
    trained = [each for each in model.parameters() if each.requires_grad]
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(how)
    name = f"{family} {seed}: width {width}, {layers} layers, batch {tuple(batch.shape)}, {how}"
    return Subject(family, name, model, (batch,), _loss, None if made is None else made(trained, lr=1e-3))


def _loss(output: Any, batch: Any) -> torch.Tensor:
    if output.dim() == 3 and batch[0].dtype == torch.long:
        return F.cross_entropy(output.flatten(0, 1), batch[0].flatten())
    return output.float().square().mean()
