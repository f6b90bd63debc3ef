"""Decoder blocks of a Llama's shape with random weights, as many as a benchmark asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import nn

VOCABULARY = 1024
LLAMA_VOCABULARY = 128_256


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a block."""

    width: int
    heads: int
    kv_heads: int
    ffn: int
    dtype: torch.dtype

    @property
    def parameter_bytes(self) -> int:
        """Of one block."""
        with torch.device("meta"):
            return sum(p.nbytes for p in Block(self).to(self.dtype).parameters())

    def input_bytes(self, tokens: int) -> int:
        """Of one block."""
        return tokens * self.width * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        return f"width {self.width}, {self.heads} heads, {self.kv_heads} of keys, MLP {self.ffn}, {dtype}"


LLAMA_8B = Shape(4096, 32, 8, 14_336, torch.bfloat16)


class Block(nn.Module):
    """Attention with fewer heads for keys and values, and a gated MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.head = shape.width, shape.width // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, self.head * shape.kv_heads, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        q, k, v = (part(normed).view(batch, length, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """`x`, of shape (batch, heads, length, head), each position turned by its angles."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 500_000.0 ** (torch.arange(half, device=x.device) / -half)
    angles = torch.outer(torch.arange(length, device=x.device), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def straight(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


class Stack(nn.Module):
    """An embedding, so that the first block's input is nobody else's, and the blocks."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(layers))

    def forward(
        self, ids: torch.Tensor, through: Callable[[nn.Module, torch.Tensor], torch.Tensor] = straight
    ) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = through(layer, x)
        return x


def build(shape: Shape, layers: int, device: str) -> Stack:
    torch.manual_seed(0)
    with torch.device("meta"):
        stack = Stack(shape, layers).to(shape.dtype)
    stack.to_empty(device=device)
    with torch.no_grad():
        for parameter in (stack.embed.weight, *stack.layers[0].parameters()):
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    # A CPU draws random numbers for longer than all else here takes, and every block may have the same.
    for layer in stack.layers[1:]:
        layer.load_state_dict(stack.layers[0].state_dict())
    return stack


def llama(layers: int, width: int, inner: int, heads: int, positions: int = 8192) -> nn.Module:
    """The model of transformers in a Llama 3's shape, on the default device."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=LLAMA_VOCABULARY,
        max_position_embeddings=positions,
    )
    return transformers.LlamaForCausalLM(config)
