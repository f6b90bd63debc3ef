"""The host's time for saved tensors that are small: ``offload(min_bytes=0)`` beside ``save_on_cpu(pin_memory=True)``.

The blocks are those of a GPT-2 and a Llama of width 256 on 2 x 64 tokens in bf16, whose 31 and 40 saved tensors take
2 MiB together. The time is the process's own: on a card, and on the libraries of `tests/ghost` without one, it is what
the host spends on hooks, copies and events.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import memscale as ms

PLAIN, OURS, THEIRS = "plain", "offload(min_bytes=0)", "save_on_cpu(pin_memory=True)"
WIDTH, TOKENS = 256, 64
# Run between two readings of the clock, whose resolution is a hundredth of the time of one.
_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """The host's time for forward and backward of a block, and how much of it is beyond the plain block."""

    block: str
    contender: str
    milliseconds: float
    beyond_plain: float


def gpt2_block(device: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=1, n_head=4, vocab_size=128, n_positions=TOKENS)
    model = transformers.GPT2LMHeadModel(config).to(device, torch.bfloat16)
    return model.transformer.h[0], {}


def llama_block(device: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes)).to(device, torch.bfloat16)
    positions = torch.arange(TOKENS, device=device)[None]
    rotary = model.model.rotary_emb(torch.empty(0, dtype=torch.bfloat16, device=device), positions)
    return model.model.layers[0], {"position_embeddings": rotary, "attention_mask": None}


BLOCKS = {"gpt2": gpt2_block, "llama": llama_block}


def measure_small(device: str, rounds: int) -> list[Row]:
    """The contenders take turns; each row has the lower quartile of `rounds` times 10 rounds."""
    transformers.logging.set_verbosity_error()
    rows = []
    for name, make in BLOCKS.items():
        block, options = make(device)
        moved = ms.offload(min_bytes=0)(block)
        x = torch.randn(2, TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)

        def theirs(block: Any = block, x: torch.Tensor = x, options: dict[str, Any] = options) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return block(x, **options)

        contenders: dict[str, Callable[[], Any]] = {
            PLAIN: lambda block=block, x=x, options=options: block(x, **options),
            OURS: lambda moved=moved, x=x, options=options: moved(x, **options),
            THEIRS: theirs,
        }
        took: dict[str, list[float]] = {contender: [] for contender in contenders}
        for turn in range(10 * rounds + 4):
            for contender, run in contenders.items():
                start = time.process_time()
                for _ in range(_STEPS):
                    output = run()
                    (output[0] if isinstance(output, tuple) else output).sum().backward()
                if turn >= 4:
                    took[contender].append(1e3 * (time.process_time() - start) / _STEPS)
        quartile = {contender: statistics.quantiles(times, n=4)[0] for contender, times in took.items()}
        rows += [Row(name, contender, each, each - quartile[PLAIN]) for contender, each in quartile.items()]
    return rows
