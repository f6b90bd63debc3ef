"""cast() against torch.autocast, float32 weights and bfloat16 arithmetic: step time, allocator peak, weight casts.

A stack in the shape of GPT-2. All contenders run in one process, their steps interleaved; figures are medians.

    python benchmarks/bench_cast.py [--device cuda] [--rounds 20]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _blocks import TransformerBlock
from bench_checkpoint import interleaved_seconds
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms

Step = Callable[[], None]
VOCABULARY = 4096


class Stack(nn.Module):
    """Tokens in, loss out: embeddings, blocks (or one, again and again), a norm, and a head tied to the embeddings."""

    def __init__(self, width: int, heads: int, depth: int, length: int, *, shared: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        blocks = [TransformerBlock(width, heads) for _ in range(1 if shared else depth)]
        self.layers = nn.ModuleList(blocks * depth if shared else blocks)
        self.norm = nn.LayerNorm(width)
        self.recompute = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            hidden = torch_checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        logits = F.linear(self.norm(hidden), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class WeightCasts(TorchDispatchMode):
    """Counts the copies of weights in another dtype, by their shapes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes = {parameter.shape for parameter in model.parameters() if parameter.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_narrow = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16
        self.count += to_narrow and args[0].shape in self.shapes
        return func(*args, **(kwargs or {}))


def contenders(model: Stack, tokens: torch.Tensor) -> dict[str, Step]:
    device = tokens.device.type

    def step_of(forward: Callable[[], torch.Tensor], recompute: bool = False) -> Step:
        def step() -> None:
            model.recompute = recompute
            forward().backward()
            model.recompute = False
            for parameter in model.parameters():
                parameter.grad = None

        return step

    def autocast(cache: bool = True) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=cache):
                return model(tokens)

        return forward

    whole = ms.transform(model, {"": ms.cast()})
    bare = ms.transform(model, {"": ms.cast(keep=())})
    around = ms.transform(model, {"": ms.cast(), "layers.*": ms.checkpoint()})
    inside = ms.transform(model, {"": ms.cast(), "layers.*": ms.compose(ms.checkpoint(), ms.cast())})
    return {
        "float32": step_of(lambda: model(tokens)),
        "autocast": step_of(autocast()),
        "autocast, no cache": step_of(autocast(cache=False)),
        "cast": step_of(lambda: whole(tokens)),
        "cast(keep=())": step_of(lambda: bare(tokens)),
        "autocast + torch checkpoint": step_of(autocast(), recompute=True),
        "the same, no cache": step_of(autocast(cache=False), recompute=True),
        "cast around checkpoint": step_of(lambda: around(tokens)),
        "checkpoint around cast": step_of(lambda: inside(tokens)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {options.device}, {options.depth} blocks of width {options.width}, "
        f"{options.batch} x {options.length} tokens, medians of {options.rounds} interleaved rounds"
    )
    for shared in (False, True):
        torch.manual_seed(0)
        model = Stack(options.width, options.width // 64, options.depth, options.length, shared=shared)
        tokens = torch.randint(0, VOCABULARY, (options.batch, options.length), device=options.device)
        compare(model.to(options.device), tokens, options.rounds, "one block, again and again" if shared else "blocks")


def compare(model: Stack, tokens: torch.Tensor, rounds: int, title: str) -> None:
    device = tokens.device.type
    steps = contenders(model, tokens)
    for step in steps.values():
        step()
        step()
    peak = {who: ms.measure(step, device=device).growth_bytes for who, step in steps.items()}
    casts = {}
    for who, step in steps.items():
        with WeightCasts(model) as counter:
            step()
        casts[who] = counter.count
    took = interleaved_seconds(steps, rounds, device)
    state_bytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"\n{title}: {state_bytes / 2**20:.1f} MiB of float32 parameters")
    print(f"{'':28} {'step':>9} {'of autocast':>12} {'peak':>10} {'of autocast':>12} {'weight casts':>13}")
    for who in steps:
        print(
            f"{who:28} {1e3 * took[who]:6.1f} ms {took[who] / took['autocast']:12.2f} {peak[who] / 2**20:6.1f} MiB "
            f"{peak[who] / peak['autocast']:12.2f} {casts[who]:13}"
        )


if __name__ == "__main__":
    main()
