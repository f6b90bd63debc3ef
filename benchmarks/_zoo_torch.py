"""Architectures of the zoo in plain PyTorch, each with a habit of its own in what it keeps and allocates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from _blocks import TransformerBlock
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Autocast(nn.Module):
    """A model whose forward, and the loss in it, run under CUDA's autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(*args, **kwargs)


def conv_norm(cin: int, cout: int, *, stride: int = 1, groups: int = 1, kernel: int = 3) -> nn.Sequential:
    """Convolution, BatchNorm, in-place ReLU."""
    conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


def convnet() -> nn.Module:
    """Stages of convolution and BatchNorm with max pooling between them."""
    layers: list[nn.Module] = []
    widths = (3, 32, 64, 128)
    for cin, cout in itertools.pairwise(widths):
        layers += [conv_norm(cin, cout), conv_norm(cout, cout), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def depthwise() -> nn.Module:
    """Depthwise and pointwise convolutions, strided, as mobile networks have."""
    widths = ((32, 64, 1), (64, 96, 2), (96, 128, 1), (128, 128, 1), (128, 192, 2), (192, 192, 1))
    layers: list[nn.Module] = [conv_norm(3, 32, stride=2)]
    for cin, cout, stride in widths:
        layers.append(
            nn.Sequential(
                conv_norm(cin, cin, stride=stride, groups=cin), conv_norm(cin, cout, kernel=1), nn.Hardswish()
            )
        )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(192, 10))


def conv3d() -> nn.Module:
    """Video: 3-D convolutions, BatchNorm3d, average pooling."""

    def block(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(cin, cout, 3, padding=1), nn.BatchNorm3d(cout), nn.ReLU(), nn.AvgPool3d(2))

    return nn.Sequential(block(3, 16), block(16, 32), block(32, 64), nn.Flatten(), nn.Linear(64 * 2 * 5 * 5, 10))


def conv1d() -> nn.Module:
    """Audio: dilated and strided 1-D convolutions with a circular border."""

    def block(width: int, dilation: int) -> nn.Module:
        conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, padding_mode="circular")
        return nn.Sequential(conv, nn.InstanceNorm1d(width, affine=True), nn.LeakyReLU(0.2))

    stem = nn.Conv1d(1, 64, 16, stride=8, padding=4)
    return nn.Sequential(stem, *[block(64, 2**power) for power in range(6)], nn.Conv1d(64, 4, 1))


class ResidualGroupNorm(nn.Module):
    """Two convolutions with GroupNorm and SiLU, and a shortcut; an optional embedding is added between them."""

    def __init__(self, cin: int, cout: int, embedding: int = 0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.shortcut = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        self.embed = nn.Linear(embedding, cout) if embedding else None

    def forward(self, x: torch.Tensor, embedding: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        if self.embed is not None and embedding is not None:
            hidden = hidden + self.embed(F.silu(embedding))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


def groupnorm_net() -> nn.Module:
    """Residual blocks with GroupNorm at one width."""
    blocks = [ResidualGroupNorm(64, 64) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.Conv2d(64, 3, 3, padding=1))


class UNet(nn.Module):
    """Skip connections by concatenation, transposed convolutions on the way up."""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96)) -> None:
        super().__init__()
        outer = (3, *widths[:-1])
        self.down = nn.ModuleList([self._double(cin, cout) for cin, cout in zip(outer, widths, strict=True)])
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList([nn.ConvTranspose2d(deep, shallow, 2, stride=2) for deep, shallow in pairs])
        self.merge = nn.ModuleList([self._double(2 * shallow, shallow) for _, shallow in pairs])
        self.head = nn.Conv2d(widths[0], 4, 1)

    @staticmethod
    def _double(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(conv_norm(cin, cout), conv_norm(cout, cout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class DiffusionUNet(nn.Module):
    """A noise predictor: timestep embedding, GroupNorm blocks, attention at the bottom, nearest upsampling."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = ResidualGroupNorm(width, width, 4 * width)
        self.down2 = ResidualGroupNorm(width, 2 * width, 4 * width)
        self.norm = nn.GroupNorm(8, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up2 = ResidualGroupNorm(4 * width, width, 4 * width)
        self.up1 = ResidualGroupNorm(2 * width, width, 4 * width)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=noisy.device) * (-math.log(10_000) / half))
        angles = timestep[:, None].float() * rates
        embedding = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1).to(noisy.dtype))
        first = self.down1(self.stem(noisy), embedding)
        second = self.down2(F.avg_pool2d(first, 2), embedding)
        batch, channels, height, wide = second.shape
        tokens = self.norm(second).flatten(2).transpose(1, 2)
        attended = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        x = second + attended.transpose(1, 2).reshape(batch, channels, height, wide)
        x = self.up2(torch.cat([x, second], dim=1), embedding)
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.head(self.up1(torch.cat([x, first], dim=1), embedding))


class Autoencoder(nn.Module):
    """Strided convolutions down, bilinear interpolation and transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.ELU(), nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.ELU()
        )
        self.mix = nn.Conv2d(64, 64, 3, padding=1)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ELU())
        self.head = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.decoder(F.elu(self.mix(self.encoder(x))))
        return self.head(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)).sigmoid()


class RecurrentTagger(nn.Module):
    """Embedding, a recurrent network of two layers, a projection for each token."""

    def __init__(self, kind: type[nn.RNNBase], *, bidirectional: bool = False, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, 128)
        self.rnn = kind(128, 256, num_layers=2, batch_first=True, dropout=0.1, bidirectional=bidirectional)
        self.head = nn.Linear(256 * (1 + bidirectional), 1000)
        self.lengths = lengths

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if not self.lengths:
            return self.head(self.rnn(x)[0])
        packed = pack_padded_sequence(x, torch.tensor(self.lengths, device="cpu"), batch_first=True)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class Cells(nn.Module):
    """A recurrence written by hand, of PyTorch's cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(96, 256), nn.GRUCell(256, 256), nn.Linear(256, 300)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden, state, states = None, None, []
        for x in steps:
            hidden = self.lstm(x, hidden)
            state = self.gru(hidden[0], state)
            states.append(state)
        return self.head(torch.stack(states))


class Gated(nn.Module):
    """A gated layer behind PyTorch's RMS norm."""

    def __init__(self, width: int = 256, inner: int = 688) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(width), nn.Linear(inner, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def gated() -> nn.Module:
    return nn.Sequential(*[Gated() for _ in range(4)])


class Translator(nn.Module):
    """nn.Transformer with causal and padding masks, over embeddings of two languages."""

    def __init__(self, width: int = 192, words: int = 4000) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.transformer = nn.Transformer(width, 6, 3, 3, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        embedded = self.target(target)
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=target.device, dtype=embedded.dtype)
        return self.head(self.transformer(self.source(source), embedded, tgt_mask=causal, tgt_is_causal=True))


class SoftmaxBlock(nn.Module):
    """Attention that materialises its scores, masks them and takes a softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = F.dropout(scores.masked_fill(future, -torch.inf).softmax(-1), 0.1, self.training)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class LanguageModel(nn.Module):
    """Token and position embeddings, blocks, a head; `autocast` runs the blocks in bfloat16."""

    def __init__(self, block: type[nn.Module], *, width: int = 256, words: int = 8000, autocast: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList([block(width, 8) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.autocast = autocast

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))


def sdpa_gpt(*, autocast: bool = False) -> nn.Module:
    """A decoder with `F.scaled_dot_product_attention`."""
    return LanguageModel(TransformerBlock, autocast=autocast)


def softmax_gpt() -> nn.Module:
    """A decoder with attention written by hand."""
    return LanguageModel(SoftmaxBlock)


class BagClassifier(nn.Module):
    """EmbeddingBag over ragged bags of features, beside an Embedding with dense gradients."""

    def __init__(self, words: int = 60_000, width: int = 96) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(words, width, mode="mean")
        self.items = nn.Embedding(20_000, width, sparse=False, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 512), nn.PReLU(), nn.Linear(512, 16))

    def forward(self, words: torch.Tensor, offsets: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([self.bag(words, offsets), self.items(items).mean(1)], dim=-1))


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained low-rank one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(F.dropout(x, 0.05, self.training), self.a), self.b)


def add_lora(model: nn.Module, names: tuple[str, ...], rank: int = 8) -> nn.Module:
    """Freeze `model` and put trained adapters on its linear layers of these names, in place."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, rank))
    return model


def mlp(width: int = 512, depth: int = 6) -> nn.Module:
    """Linear layers with an in-place activation."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, 10))
