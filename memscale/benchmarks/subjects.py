"""The models of the table: their batches, their cards, and what was published about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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


def _built(kind: str, config: str, **sizes: Any) -> nn.Module:
    hf = package("transformers", "python -m memscale.benchmarks", "hf")
    model: nn.Module = getattr(hf, kind)(getattr(hf, config)(**sizes))
    model.loss_type = "ForMaskedLM" if "MaskedLM" in kind else "ForCausalLM"  # type: ignore[assignment]
    return model.train()


def bert(width: int, layers: int, heads: int) -> nn.Module:
    """A BERT with a head of masked language modelling."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _built("BertForMaskedLM", "BertConfig", **sizes, intermediate_size=4 * width)


def gpt2(width: int, layers: int, heads: int) -> nn.Module:
    """A GPT-2 with its head."""
    return _built("GPT2LMHeadModel", "GPT2Config", n_embd=width, n_layer=layers, n_head=heads, use_cache=False)


def llama(width: int, inner: int, layers: int, heads: int, *, adapters: bool = False) -> nn.Module:
    """A Llama 3 with its head; with `adapters`, these alone are trained."""
    model = _built(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return _with_adapters(model) if adapters else model


class LowRank(nn.Module):
    """A frozen linear layer with a product of two small trained matrices added (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output and that of the adapter."""
        return torch.add(self.frozen(x), self.up(self.down(x)))


def _with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in path:
            model.set_submodule(path, LowRank(module, 16))
    return model


# The head, the card, and the paths inside a block and beside the blocks.
_BERT = ("cls.predictions.decoder", _CARD, None, ("bert.embeddings", "cls.predictions.transform"))
_GPT2 = ("lm_head", _CARD, "mlp", ())
_BY_SIZE = ("fastest", "smallest")
_LLAMA_8B = partial(llama, 4096, 14336, 32, 32)
_LLAMA_8B_LORA = partial(_LLAMA_8B, adapters=True)


def _today(title: str, make: Callable[[], nn.Module], batch: int, device: str, *columns: str) -> TableSubject:
    title = f"{title} {batch}×2048"
    return TableSubject(title, make, batch, 2048, "lm_head", device, "mlp", columns=columns or _BY_SIZE)


SUBJECTS: tuple[TableSubject, ...] = (
    TableSubject("BERT-Base 16×128", partial(bert, 768, 12, 12), 16, 128, *_BERT, 840_000_000, 3_140_000_000),
    TableSubject("BERT-Large 16×128", partial(bert, 1024, 24, 16), 16, 128, *_BERT, 2_020_000_000, 7_600_000_000),
    TableSubject("GPT-2 Medium 4×512", partial(gpt2, 1024, 24, 16), 4, 512, *_GPT2, 2_610_000_000, 10_870_000_000),
    TableSubject("GPT-2 Large 2×512", partial(gpt2, 1280, 36, 20), 2, 512, *_GPT2, 4_680_000_000, 14_870_000_000),
    TableSubject("GPT-2 XL 1×512", partial(gpt2, 1600, 48, 25), 1, 512, *_GPT2, 9_250_000_000),
    _today("Llama-8B", _LLAMA_8B, 1, "rtx 3090"),
    _today("Llama-8B", _LLAMA_8B, 4, "h100"),
    _today("Llama-8B LoRA", _LLAMA_8B_LORA, 1, "rtx 3090"),
    _today("Llama-8B LoRA", _LLAMA_8B_LORA, 4, "h100"),
    _today("Llama-70B", partial(llama, 8192, 28672, 80, 64), 1, "h100", "host", "disk"),
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
