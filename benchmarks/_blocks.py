"""The blocks that the checkpoint benchmark and its tests measure: small ones for overhead, real ones for the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class TransformerBlock(nn.Module):
    """A pre-norm decoder block: attention and an MLP of four times the width."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


def mlp(width: int) -> nn.Module:
    """Two projections with a GELU between them."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def conv_block(channels: int) -> nn.Module:
    """Convolution, BatchNorm, ReLU, twice."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


Case = tuple[Callable[[], nn.Module], tuple[int, ...]]

TINY: dict[str, Case] = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8)),
    "mlp": (lambda: mlp(8), (4, 8)),
    "mlp+dropout": (lambda: nn.Sequential(mlp(8), nn.Dropout(0.1)), (4, 8)),
    "conv": (lambda: conv_block(4), (2, 4, 6, 6)),
    "transformer": (lambda: TransformerBlock(16, 2), (2, 4, 16)),
}

REAL: dict[str, Case] = {
    "mlp": (lambda: mlp(256), (1024, 256)),
    "conv": (lambda: conv_block(32), (8, 32, 32, 32)),
    "transformer": (lambda: TransformerBlock(256, 4, dropout=0.1), (4, 128, 256)),
}
