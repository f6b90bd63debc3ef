"""The kinds of model that the tests train: each has something that a careless recompute gets wrong."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from memscale import name


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model, how to call it, and where its regions are.

    `refuses` maps a call pattern to the reason why PyTorch itself cannot do it with this model.
    """

    title: str
    make: Callable[[], nn.Module]
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    regions: tuple[str, ...] = ("*",)
    refuses: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.title


def numbers(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def only(*tensors: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tensors, {}


def mlp(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """A residual MLP, which `norm` normalises first."""

    def __init__(self, width: int, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else None
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x if self.norm is None else self.norm(x))))


class Polynomial(nn.Module):
    """Integer weights and x² + x in float64: every sum is exact, in whatever order it is taken."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-2, 3, (width, width)).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = name(x @ self.weight, "kept")
        return hidden * hidden + hidden


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).double().requires_grad_()


class ConvBlock(nn.Module):
    """BatchNorm statistics, a ReLU in place, a counter and a list that grows."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)
        self.calls = 0
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append((self.calls, tuple(x.shape)))
        return self.act(self.norm(name(self.conv(x), "kept")))


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, with dropout inside the attention and after both."""

    def __init__(self, width: int = 8, heads: int = 2, dropout: float = 0.3) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.drop = mlp(width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        attended = name(attended, "kept")
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class FrozenHalves(nn.Module):
    """A frozen projection of two slices of the sequence.

    With one row in the batch, the strides of a slice decide whether PyTorch folds the product with the frozen weight
    into a matrix product; a recompute must see the same strides.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())
        self.part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.part(x[:, :2]), self.part(x[:, 2:])], 1)


class Tied(nn.Module):
    """Two modules that hold one weight, and a third that reads it transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = name(torch.tanh(self.second(torch.tanh(self.first(x)))), "kept")
        return F.linear(hidden, self.first.weight.t())


def frozen() -> nn.Module:
    model = nn.Sequential(mlp(), mlp(), mlp())
    model[0].requires_grad_(False)
    model[1][2].requires_grad_(False)
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> Any:
        out, (hidden, memory) = self.cell(x)
        return self.head(out), (hidden, memory)


class Mixed(nn.Module):
    """Arguments and results of every sort: keyword, tuple, dictionary, `None`, string, number."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, pair, *, options, mode, mask=None, scale=1.0):
            hidden = self.linear(x) * pair[0] + pair[1][0]
            hidden = torch.tanh(hidden) if mode == "tanh" else hidden
            hidden = hidden if mask is None else hidden.masked_fill(mask, 0.0)
            return {"hidden": hidden * scale * options["gain"], "none": mask, "mode": mode, "pair": (hidden, (2, x))}

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Mixed.Part(), Mixed.Part()

    def forward(self, x, pair, options, mode="tanh", mask=None):
        first = self.one(x, pair, options=options, mode=mode, scale=0.5)
        second = self.two(first["hidden"], pair=pair, options=options, mode="none", mask=mask)
        return first, second, None, "done"


def mixed_arguments():
    pair = (numbers(3, 4), [numbers(4)])
    return (numbers(3, 4), pair), {"options": {"gain": numbers(1), "unused": "text"}, "mask": torch.eye(3, 4).bool()}


@dataclasses.dataclass
class Result:
    out: torch.Tensor
    note: str
    extra: tuple[torch.Tensor, None]


class WithDataclass(nn.Module):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Result:
            hidden = name(self.linear(x), "kept").sigmoid()
            return Result(out=hidden.exp(), note="sigmoid", extra=(hidden, None))

    def __init__(self) -> None:
        super().__init__()
        self.part = WithDataclass.Part()

    def forward(self, x: torch.Tensor) -> Result:
        inner = self.part(x)
        return Result(out=inner.out + inner.extra[0], note=inner.note, extra=(inner.out * 2, None))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls = mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.block(self.block(x).tanh() + x)


class InPlace(nn.Module):
    """Regions that change their own input, which is used again after them."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            return name(self.linear(x.add_(1.0)), "kept").sigmoid()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = InPlace.Part(), InPlace.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + 1
        out = self.first(hidden) + hidden
        return self.second(out) + out


class Spectral(nn.Module):
    """Power iteration in a buffer that the forward both changes and uses, as `spectral_norm` does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("direction", F.normalize(torch.randn(4), dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            v = F.normalize(self.weight.t().mv(self.direction), dim=0)
            if self.training:
                self.direction.copy_(F.normalize(self.weight.mv(v), dim=0))
            u = self.direction.clone()
        return F.linear(x, self.weight / torch.dot(u, self.weight.mv(v))).tanh()


class Auxiliary(nn.Module):
    """Keeps a term of the loss on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.auxiliary: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = name(self.linear(x), "kept")
        self.auxiliary = hidden.softmax(-1).pow(2).mean()
        return hidden.relu()


class Noisy(nn.Module):
    """Draws from all three generators of the host, and an argument that is drawn anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = random.random() + float(np.random.rand())
        return (self.linear(name(x + torch.randn_like(x), "kept")) * gain).sigmoid() * torch.rand(4)


class Tokens(nn.Module):
    """An integer input, so no input of the first region requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(11, 6), mlp(), nn.Linear(6, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


class Wide(nn.Module):
    """A region that casts its input several times under autocast, and shares a weight with what runs before it."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (name(self.query(x), "kept").sin() + self.key(x).cos()).exp()

    def __init__(self) -> None:
        super().__init__()
        self.block = Wide.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block.key(x).tanh())


IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
_LAYOUT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_COMMON = {"vocab_size": 19, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "attn_implementation": "eager"},
        ("transformer.h.*",),
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_LAYOUT, "num_key_value_heads": 1, "max_position_embeddings": 16, "attention_dropout": 0.2},
        ("model.layers.*",),
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**_LAYOUT, "max_position_embeddings": 16}, ("bert.encoder.layer.*",)),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        ("encoder.block.*", "decoder.block.*"),
    ),
}


def own_checkpointing() -> str:
    """What transformers calls its own: `activation_checkpointing` since its release 5."""
    new = hasattr(importlib.import_module("transformers").TrainingArguments, "activation_checkpointing")
    return "activation_checkpointing" if new else "gradient_checkpointing"


def hugging_face(name: str) -> nn.Module:
    """A tiny model of that architecture from its configuration, with dropout, in training mode."""
    transformers = importlib.import_module("transformers")
    config, model, settings, _ = HUGGING_FACE[name]
    return getattr(transformers, model)(getattr(transformers, config)(**_COMMON, **settings, use_cache=False)).train()


def _hugging_face_kind(name: str) -> Kind:
    regions = HUGGING_FACE[name][3]
    return Kind(name, functools.partial(hugging_face, name), lambda: ((), {"input_ids": IDS, "labels": IDS}), regions)


POLYNOMIAL = Kind(
    "polynomial", lambda: nn.Sequential(Polynomial(), Polynomial(), Polynomial()), lambda: only(integers(2, 3))
)
MLP = Kind("mlp", lambda: nn.Sequential(mlp(), mlp(), mlp()), lambda: only(numbers(3, 6)))
CONVNET = Kind("convnet", lambda: nn.Sequential(ConvBlock(), ConvBlock()), lambda: only(numbers(2, 4, 5, 5)))
TRANSFORMER = Kind(
    "transformer", lambda: nn.Sequential(TransformerBlock(), TransformerBlock()), lambda: only(numbers(2, 4, 8))
)

SMALL = (
    MLP,
    POLYNOMIAL,
    CONVNET,
    TRANSFORMER,
    Kind("tied weights", Tied, lambda: only(numbers(3, 5))),
    Kind("frozen parameters", frozen, lambda: only(numbers(3, 6, grad=False))),
    Kind("lstm", Recurrent, lambda: only(numbers(2, 3, 4))),
    Kind("mixed arguments", Mixed, mixed_arguments),
    Kind("dataclass", WithDataclass, lambda: only(numbers(3, 4))),
    Kind("reused", Reused, lambda: only(numbers(3, 6)), ("block",)),
    Kind("input in place", InPlace, lambda: only(numbers(3, 4))),
    Kind("spectral norm", lambda: nn.Sequential(Spectral(), Spectral()), lambda: only(numbers(3, 4))),
    Kind("auxiliary loss", lambda: nn.Sequential(Auxiliary(), Auxiliary()), lambda: only(numbers(3, 4))),
    Kind("noisy", lambda: nn.Sequential(Noisy(), Noisy()), lambda: only(numbers(3, 4))),
    Kind("wide", Wide, lambda: only(numbers(3, 6)), ("block",)),
    Kind("tokens", Tokens, lambda: only(IDS % 11)),
)
LARGE = tuple(_hugging_face_kind(name) for name in HUGGING_FACE)
KINDS = SMALL + LARGE
