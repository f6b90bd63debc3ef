"""The way of accelerate to FSDP2, which moves a wrapped model to `meta`, shards it and loads it, over two processes."""

from __future__ import annotations

import gc
import os
import time
import types
import weakref
from typing import Any

import torch
from torch import nn

import memscale as ms
from tests.support.coverings import in_turn

# Whether rank 0 alone reads the weights, and whether tokens and head have one matrix.
CASES = {f"accelerate{case}": case for case in in_turn([True, False], [True, False])}


def gpt2(tied: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    still = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **still, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1)  # type: ignore[arg-type]
    )


def prepared(model: nn.Module, efficient: bool, rank: int) -> nn.Module:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=efficient,
        reshard_after_forward=True,
    )
    accelerator: Any = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
        device=torch.device("cpu"),
        is_main_process=rank == 0,
        mixed_precision="no",
        parallelism_config=None,
    )
    return fsdp2_prepare_model(accelerator, model)


def losses(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert {type(each).__name__ for group in optimizer.param_groups for each in group["params"]} == {"DTensor"}
    found = []
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def alive(storages: list[Any]) -> int:
    """How many are kept: a thread of gloo lets go of what it has sent a moment after others know that it came."""
    gc.collect()
    deadline = time.monotonic() + 2
    while (kept := sum(each() is not None for each in storages)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return kept


def run(rank: int, folder: str) -> dict[str, object]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found: dict[str, object] = {}
    for name, (efficient, tied) in CASES.items():
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(efficient).lower()
        expected = losses(prepared(gpt2(tied), efficient, rank), rank)
        model = ms.wrap(gpt2(tied), ms.Config(force_optimize=True, enable_logging=False))
        whole = [weakref.ref(each.untyped_storage()) for each in model.parameters()]
        model = prepared(model, efficient, rank)
        kept = alive(whole)
        same = losses(model, rank) == expected
        executor: Any = model._memscale_executor
        ran = executor.regions_that_ran
        ms.detach(model)
        found[name] = same, kept, ran, any("forward" in each.__dict__ for each in model.modules())
    return found
