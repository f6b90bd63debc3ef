"""tile() on a language model: the loss head, the blocks over the batch, and a long MLP, against PyTorch.

GPT-2 shape (8 layers, width 512, 8 heads, vocabulary 16 000, batch 4 x 512 tokens, fp32, AdamW). Every contender trains
the same model in one process, steps interleaved; "transient" is the allocator's peak in a steady-state step above
parameters and optimizer state. Ratios are to the contender named.

    python benchmarks/bench_tile.py [--device cuda] [--rounds 5]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler logs to the terminal otherwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms

Step = Callable[[], None]
# Rows of logits at a time. Every piece reads and writes the whole sum of weight gradients, so pieces are no smaller
# than the peak, which is then elsewhere, asks for.
HEAD = ms.tile(size=256)


def gpt2(device: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16_000, n_positions=512, n_embd=512, n_layer=8, n_head=8, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).to(device).train()


def training_step(model: nn.Module, batch: dict[str, torch.Tensor], *, fused: bool = False) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def language_model(device: str) -> dict[str, Step]:
    torch.manual_seed(0)
    base = gpt2(device)
    ids = torch.randint(0, 16_000, (4, 512), device=device)
    batch = {"input_ids": ids, "labels": ids}
    plans = {
        "tiled head": {"lm_head": ms.tile(size=64)},
        "checkpoint": {"transformer.h.*": ms.checkpoint()},
        "checkpoint + tiled head": {"transformer.h.*": ms.checkpoint(), "lm_head": HEAD},
        "tiled blocks + tiled head": {"transformer.h.*": ms.tile(chunks=4), "lm_head": HEAD},
    }
    steps = {"nothing": training_step(copy.deepcopy(base), batch)}
    theirs = copy.deepcopy(base)
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    steps["torch checkpoint"] = training_step(theirs, batch)
    for name, plan in plans.items():
        steps[name] = training_step(ms.transform(copy.deepcopy(base), plan), batch)
    # PyTorch's default AdamW has temporaries as large as the largest parameter, which are the peak here.
    tiled = ms.transform(copy.deepcopy(base), plans["tiled blocks + tiled head"])
    steps["the same, fused AdamW"] = training_step(tiled, batch, fused=True)
    return steps


def head(device: str, dtype: torch.dtype, tokens: int, width: int, classes: int, chunks: int) -> dict[str, Step]:
    """A loss head alone: PyTorch's plain one, its chunked `linear_cross_entropy`, and ours."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(0, classes, (tokens,), device=device)
    linear = nn.Linear(width, classes, bias=False, device=device, dtype=dtype)
    tiled = ms.transform(linear, {"": ms.tile(chunks=chunks)})

    def step_of(loss: Callable[[], torch.Tensor]) -> Step:
        def step() -> None:
            loss().backward()
            hidden.grad = linear.weight.grad = None

        return step

    steps = {
        "plain": step_of(lambda: F.cross_entropy(linear(hidden).float(), target)),
        "memscale": step_of(lambda: F.cross_entropy(tiled(hidden).float(), target)),
    }
    # On the CPU of torch 2.13 its chunked path takes more than a minute for 256 tokens of 128,256 classes in bfloat16.
    if (device == "cuda" or dtype == torch.float32) and hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        steps["torch chunked"] = step_of(lambda: F.linear_cross_entropy(hidden, linear.weight, target, options=options))
    return steps


def long_mlp(device: str, tokens: int = 32_768) -> dict[str, Step]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    x = torch.randn(tokens, 1024, device=device, requires_grad=True)

    def step_of(forward: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        def step() -> None:
            forward(x).sum().backward()  # a loss with no memory of its own
            x.grad = None
            block.zero_grad()

        return step

    return {
        "plain": step_of(block),
        "torch checkpoint": step_of(lambda value: torch_checkpoint(block, value, use_reentrant=False)),
        "memscale": step_of(ms.transform(block, {"": ms.tile(size=512)})),
    }


def report(title: str, steps: dict[str, Step], rounds: int, device: str, references: dict[str, str]) -> None:
    """Measure every contender and print it beside the one it is compared with."""
    print(f"\n{title}")
    peak = {}
    for name, step in steps.items():
        step()
        peak[name] = ms.measure(step, device=device).growth_bytes
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    took = {name: statistics.median(values) for name, values in seconds.items()}
    for name in steps:
        line = f"  {name:26} transient {peak[name] / 1e6:8.1f} MB   step {took[name]:7.3f} s"
        if (other := references.get(name)) in steps:
            line += f"   of {other}: {peak[name] / peak[other]:.3f} memory, {took[name] / took[other]:.3f} time"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["model", "head", "mlp"])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, medians of {options.rounds} interleaved rounds")
    if options.only in (None, "model"):
        checkpointed = "torch checkpoint"
        report(
            "GPT-2 shape, 8 layers, width 512, vocabulary 16 000, 4 x 512 tokens, fp32",
            language_model(options.device),
            options.rounds,
            options.device,
            {
                checkpointed: "nothing",
                "tiled head": "nothing",
                "checkpoint": checkpointed,
                "checkpoint + tiled head": checkpointed,
                "tiled blocks + tiled head": checkpointed,
                "the same, fused AdamW": checkpointed,
            },
        )
    if options.only in (None, "head"):
        for dtype, tokens, width, classes, chunks in (
            (torch.float32, 2048, 512, 16_000, 16),
            (torch.bfloat16, 2048, 512, 16_000, 2),
            (torch.bfloat16, 4096, 1024, 128_256, 32),
        ):
            steps = head(options.device, dtype, tokens, width, classes, chunks)
            report(
                f"loss head: {tokens} tokens, width {width}, {classes} classes, {dtype}, {chunks} pieces",
                steps,
                max(options.rounds // 2, 2),
                options.device,
                dict.fromkeys(steps, "plain"),
            )
    if options.only in (None, "mlp"):
        steps = long_mlp(options.device)
        report(
            "MLP 1024-4096-1024 over 32 768 tokens, fp32",
            steps,
            max(options.rounds // 2, 2),
            options.device,
            dict.fromkeys(steps, "plain"),
        )


if __name__ == "__main__":
    main()
