"""Twelve small models of kinds that planners rarely meet, each with plans that one writes for it by hand.

Activations are most of each step, so that the smallest peak tells how far compositions of transforms go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _blocks import TransformerBlock
from _zoo_torch import UNet
from torch import nn

import memscale as ms
from memscale.algebra import Transform
from memscale.core import Loss

Hand = Mapping[str, Transform]

again = ms.checkpoint()


def rows(chunks: int, **dims: Any) -> Transform:
    return ms.tile(chunks=chunks, **dims)


@dataclass(frozen=True)
class Small:
    """A model with a batch, the loss, and plans by hand."""

    make: Callable[[], tuple[nn.Module, Any]]
    loss: Loss
    hands: Mapping[str, Hand]


def squares(output: Any, _: Any) -> torch.Tensor:
    tensors = output if isinstance(output, tuple) else (output,)
    return torch.stack([each.square().mean() for each in tensors]).sum()


def feed_forward(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))


class Attention(nn.Module):
    """Attention over a context, by default over the queries themselves; its scores are tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(-2))


class Convolution(nn.Module):
    """The convolution of a conformer: pointwise with gate, depthwise in time, pointwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.glu(self.mix(self.norm(x)))
        return self.out(F.silu(self.depthwise(x.transpose(1, 2)).transpose(1, 2)))


class ConformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ff1, self.ff2 = feed_forward(width, 4 * width), feed_forward(width, 4 * width)
        self.attention, self.conv, self.norm = Attention(width, 4), Convolution(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ff1(x) / 2
        x = x + self.attention(x)
        x = x + self.conv(x)
        return self.norm(x + self.ff2(x) / 2)


class Conformer(nn.Module):
    """Speech: strided convolutions over a spectrogram, conformer blocks, a head of characters."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(40, width, 3, 2, 1), nn.ReLU(), nn.Conv1d(width, width, 3, 2, 1), nn.ReLU())
        self.blocks = nn.ModuleList(ConformerBlock(width) for _ in range(4))
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


class Perceiver(nn.Module):
    """Latents that attend to a long input, then to themselves, four times."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(32, width))
        self.inputs = nn.Linear(12, width)
        self.cross = nn.ModuleList(Attention(width, 4) for _ in range(4))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(width, 4), "mlp": feed_forward(width, 4 * width)}) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        z = self.latents.expand(len(x), -1, -1)
        for cross, block in zip(self.cross, self.blocks, strict=True):
            z = z + cross(z, x)
            z = z + block["attention"](z)
            z = z + block["mlp"](z)
        return self.head(z.mean(1))


class ExpertChoice(nn.Module):
    """Experts that choose their tokens, the same number each."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(width, count), nn.LayerNorm(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        found = torch.zeros_like(flat)
        for expert, weight in zip(self.experts, weights.unbind(-1), strict=True):
            top = weight.topk(len(flat) // 2)
            found = found.index_add(0, top.indices, expert(flat[top.indices]) * top.values[:, None])
        return found.view_as(x)


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.experts = Attention(width, 4), ExpertChoice(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.experts(x)


def experts() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), *[ExpertBlock(64) for _ in range(3)], nn.Linear(64, 16))


def volumes() -> nn.Module:
    """Medical images: stages of 3-D convolutions with norms of groups."""

    def stage(cin: int, cout: int) -> nn.Module:
        def layer(cin: int) -> list[nn.Module]:
            return [nn.Conv3d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.SiLU()]

        return nn.Sequential(*layer(cin), *layer(cout))

    pool = nn.AvgPool3d(2)
    return nn.Sequential(stage(1, 8), pool, stage(8, 16), pool, stage(16, 32), nn.AdaptiveAvgPool3d(1), nn.Flatten())


class Recurrent(nn.Module):
    """One block, run many times over a state with the inputs added."""

    def __init__(self, width: int = 64, rounds: int = 8) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Linear(16, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.block, self.head, self.rounds = TransformerBlock(width, 4, dropout=0.0), nn.Linear(width, 16), rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.inputs(x)
        state = torch.zeros_like(given)
        for _ in range(self.rounds):
            state = self.block(state + given)
        return self.head(state)


class Clip(nn.Module):
    """A tower for images, one for texts, and the similarities of all pairs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, width, 8, 8), nn.Embedding(500, width)
        self.image = nn.Sequential(*[TransformerBlock(width, 4, dropout=0.0) for _ in range(4)])
        self.text = nn.Sequential(*[TransformerBlock(width, 4, dropout=0.0) for _ in range(3)])

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        image = self.image(self.patches(images).flatten(2).transpose(1, 2)).mean(1)
        text = self.text(self.words(texts)).mean(1)
        return F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T


class Translator(nn.Module):
    """An LSTM that reads, an LSTM that writes, attention between them, and a head of words."""

    def __init__(self, width: int = 64, words: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.LSTM(width, width, 2, batch_first=True)
        self.attention, self.head = Attention(width, 4), nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        read, state = self.encoder(self.embed(source))
        written, _ = self.decoder(self.embed(target), state)
        return self.head(written + self.attention(written, read))


class Field(nn.Module):
    """A potential: its value and its derivative by the positions, of which both are trained on."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width), nn.SiLU())
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
        energy = self.out(hidden).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -gradient


class Mixer(nn.Module):
    """Across the patches, then across the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.across, self.along = feed_forward(patches, 4 * patches), feed_forward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        return x + self.along(x)


def mixer() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 64), *[Mixer(64, 64) for _ in range(4)], nn.Linear(64, 10))


class MessagePassing(nn.Module):
    """A layer of a graph network: messages along edges, sums at nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = feed_forward(2 * width, 2 * width), feed_forward(2 * width, 2 * width)
        self.narrow, self.out = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        messages = self.narrow(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
        summed = torch.zeros_like(x).index_add(0, edges[1], messages)
        return x + self.out(self.update(torch.cat([x, summed], -1)))


class Graphs(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.out(x)


def _words(*shape: int, most: int = 500) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(0))


def _labels(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


SMALL: dict[str, Small] = {
    "conformer": Small(
        lambda: (Conformer(), torch.randn(8, 40, 512)),
        squares,
        {
            "blocks": {"blocks.*": again},
            "around tiles": {
                "blocks.*": again,
                **{f"blocks.*.{name}": rows(4) for name in ("ff1", "ff2", "attention")},
            },
            "whole in 8 rows": {"": rows(8), "blocks.*": again},
        },
    ),
    "perceiver": Small(
        lambda: (Perceiver(), torch.randn(8, 512, 12)),
        squares,
        {
            "attention": {"cross.*": again, "blocks.*.attention": again, "blocks.*.mlp": again},
            "whole in 8 rows": {"": rows(8)},
            "whole in 8 rows, checkpoints": {"": rows(8), "cross.*": again, "blocks.*.mlp": again},
        },
    ),
    "expert choice": Small(
        lambda: (experts(), torch.randn(8, 128, 16)),
        squares,
        {
            "blocks": {"*": again},
            "around experts": {"[123]": again, "[123].experts.experts.*": again},
            "around experts and tiles": {
                "[123]": again,
                "[123].experts.experts.*": rows(4),
                "[123].attention": rows(8),
            },
        },
    ),
    "volumes": Small(
        lambda: (volumes(), torch.randn(4, 1, 24, 24, 24)),
        squares,
        {
            "stages": {"0": again, "2": again, "4": again},
            "stages in 2 rows": {"0": rows(2), "2": rows(2), "4": again},
            "whole in 4 rows": {"": rows(4), "0": again},
        },
    ),
    "one block": Small(
        lambda: (Recurrent(), torch.randn(8, 128, 16)),
        squares,
        {
            "block": {"block": again},
            "block, inputs tiled": {"block": again, "inputs": rows(8)},
            "whole in 8 rows": {"": rows(8), "block": again},
        },
    ),
    "clip": Small(
        lambda: (Clip(), (torch.randn(16, 3, 64, 64), _words(16, 64))),
        squares,
        {
            "blocks": {"image.*": again, "text.*": again},
            "blocks in rows": {"image.*": rows(8), "text.*": rows(8)},
            "towers in rows": {"image": rows(16), "text": rows(16)},
        },
    ),
    "lstm": Small(
        lambda: (Translator(), (_words(16, 64), _words(16, 64))),
        _labels,
        {
            "all again": {"encoder": again, "decoder": again, "attention": again},
            "more pieces": {"attention": rows(8), "head": rows(16)},
            "rnns in rows": {
                "encoder": rows(4, in_dims=0, out_dims=(0, (1, 1))),
                "attention": rows(8),
                "decoder": again,
                "head": rows(16),
            },
        },
    ),
    "u-net": Small(
        lambda: (UNet((8, 16, 32)).eval(), torch.randn(8, 3, 64, 64)),
        squares,
        {
            "stages": {"down.*": again, "merge.*": again},
            "stages in 4 rows": {"down.*": rows(4), "merge.*": rows(4)},
            "whole in 8 rows": {"": rows(8)},
        },
    ),
    "field": Small(
        lambda: (Field(), torch.randn(2048, 3)),
        squares,
        {
            "blocks": {"blocks.*": again},
            "blocks in rows": {"blocks.*": rows(4)},
            "all but ends": {"blocks.*": again, "out": again},
        },
    ),
    "mixer": Small(
        lambda: (mixer(), torch.randn(16, 64, 48)),
        squares,
        {
            "blocks": {"[1234]": again},
            "around tiles": {"[1234]": again, "[1234].across": rows(4), "[1234].along": rows(4)},
            "whole in 16 rows": {"": rows(16)},
        },
    ),
    "graph": Small(
        lambda: (Graphs(), (torch.randn(1000, 8), _words(2, 6000, most=1000))),
        squares,
        {
            "layers": {"layers.*": again},
            "around messages": {"layers.*": again, "layers.*.message": again},
            "around tiles": {"layers.*": again, "layers.*.message": rows(8), "layers.*.update": rows(8)},
        },
    ),
    "flat": Small(
        lambda: (
            nn.Sequential(*[each for at in range(8) for each in (nn.Linear(64, 64), nn.GELU())]),
            torch.randn(4096, 64),
        ),
        squares,
        {
            "segments": {"": ms.checkpoint(cuts=(4, 8, 12))},
            "whole in 8 rows": {"": rows(8)},
            "whole in 16 rows": {"": rows(16)},
        },
    ),
}
