"""The models of the table: their batches, their cards, and what was published about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memscale.core import package

_CARD = "rtx 3090"


@dataclass(frozen=True)
class TableSubject:
    """A training step that is simulated.

    Attributes:
        title: what the row is called.
        make: builds the model in training mode; under ``torch.device("meta")``, without weights.
        batch, length: of token ids.
        head: the path of the linear layer of the loss.
        device: the card.
        inner: the path, within a block, of a module that works on each position separately; None without such a module.
        others: the paths of modules besides the blocks that are worth recomputing.
        published_bytes: the peak of the closed tool of the same name (AGGRESSIVE, bf16 and 8-bit Adam); None if
            unpublished.
        published_plain_bytes: the peak of the model without that tool, from the same source.
        columns: the titles of the columns; empty means all columns for models of this size.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: int
    length: int
    head: str
    device: str = _CARD
    inner: str | None = None
    others: tuple[str, ...] = ()
    published_bytes: int | None = None
    published_plain_bytes: int | None = None
    columns: tuple[str, ...] = ("exact", "bf16 + 8-bit", "everything")

    def inputs(self) -> dict[str, torch.Tensor]:
        """The batch."""
        ids = torch.zeros(self.batch, self.length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


def _transformers() -> Any:
    return package("transformers", "python -m memscale.benchmarks", "hf")


def _bert(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hf = _transformers()
        config = hf.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
        )
        return _built(hf.BertForMaskedLM, config)

    return make


def _gpt2(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hf = _transformers()
        return _built(hf.GPT2LMHeadModel, hf.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, use_cache=False))

    return make


def _llama(width: int, inner: int, layers: int, heads: int, *, adapters: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hf = _transformers()
        config = hf.LlamaConfig(
            vocab_size=128256,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
        model = _built(hf.LlamaForCausalLM, config)
        return _with_adapters(model) if adapters else model

    return make


def _built(kind: Any, config: Any) -> nn.Module:
    model: nn.Module = kind(config)
    model.loss_type = "ForMaskedLM" if "MaskedLM" in kind.__name__ else "ForCausalLM"  # type: ignore[assignment]
    return model.train()


class LowRank(nn.Module):
    """A frozen linear layer with a product of two small trained matrices added (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output and that of the adapter."""
        made: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return made


def _with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in path:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LowRank(module, 16))
    return model


def _gigabytes(figure: float) -> int:
    return round(figure * 10**9)


_DECODER = "cls.predictions.decoder"
_LLAMA_8B = (4096, 14336, 32, 32)
_BY_SIZE = ("fastest", "smallest")


def _published(
    title: str, make: Callable[[], nn.Module], batch: int, length: int, head: str, figure: float, plain: float | None
) -> TableSubject:
    inner, others = ("mlp", ()) if head == "lm_head" else (None, ("bert.embeddings", "cls.predictions.transform"))
    plain_bytes = None if plain is None else _gigabytes(plain)
    return TableSubject(title, make, batch, length, head, _CARD, inner, others, _gigabytes(figure), plain_bytes)


def _today(title: str, make: Callable[[], nn.Module], batch: int, device: str, *columns: str) -> TableSubject:
    title = f"{title} {batch}×2048"
    return TableSubject(title, make, batch, 2048, "lm_head", device, "mlp", columns=columns or _BY_SIZE)


SUBJECTS: tuple[TableSubject, ...] = (
    _published("BERT-Base 16×128", _bert(768, 12, 12), 16, 128, _DECODER, 0.84, 3.14),
    _published("BERT-Large 16×128", _bert(1024, 24, 16), 16, 128, _DECODER, 2.02, 7.60),
    _published("GPT-2 Medium 4×512", _gpt2(1024, 24, 16), 4, 512, "lm_head", 2.61, 10.87),
    _published("GPT-2 Large 2×512", _gpt2(1280, 36, 20), 2, 512, "lm_head", 4.68, 14.87),
    _published("GPT-2 XL 1×512", _gpt2(1600, 48, 25), 1, 512, "lm_head", 9.25, None),
    _today("Llama-8B", _llama(*_LLAMA_8B), 1, "rtx 3090"),
    _today("Llama-8B", _llama(*_LLAMA_8B), 4, "h100"),
    _today("Llama-8B LoRA", _llama(*_LLAMA_8B, adapters=True), 1, "rtx 3090"),
    _today("Llama-8B LoRA", _llama(*_LLAMA_8B, adapters=True), 4, "h100"),
    _today("Llama-70B", _llama(8192, 28672, 80, 64), 1, "h100", "host", "disk"),
)


def chosen(names: str | None, device: str | None) -> tuple[TableSubject, ...]:
    """The subjects whose title begins as one of `names` does, which are separated by commas, on `device` if given.

    Raises:
        ValueError: a name is of none.
    """
    wanted = [name.strip().lower() for name in names.split(",")] if names else [""]
    for name in wanted:
        if not any(each.title.lower().startswith(name) for each in SUBJECTS):
            raise ValueError(f"no model is called {name!r}; there are {', '.join(each.title for each in SUBJECTS)}")
    found = [each for each in SUBJECTS if any(each.title.lower().startswith(name) for name in wanted)]
    return tuple(each if device is None else replace(each, device=device) for each in found)
