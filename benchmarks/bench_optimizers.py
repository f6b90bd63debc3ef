"""Transformed optimizers against the plain one: step time, allocator peak, the same bits.

A stack in the shape of GPT-2. All contenders run in one process, their steps interleaved; figures are medians.

    python benchmarks/bench_optimizers.py [--device cuda] [--rounds 20] [--quick]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from _blocks import TransformerBlock
from bench_checkpoint import interleaved_seconds
from torch import nn

import memscale as ms
from memscale.simulation.measured import training_roles

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 512, 8, 6, 64, 2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
}
HOWS: dict[str, Any] = {
    "plain": ms.identity,
    "step_in_backward": ms.step_in_backward(),
    "step_in_groups": ms.step_in_groups(group_bytes="4MiB"),
    "offload_states": ms.offload_states(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="one small round of each, to see that it runs")
    options = parser.parse_args()
    depth, rounds = (1, 1) if options.quick else (DEPTH, options.rounds)
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        first = nn.Sequential(*[TransformerBlock(WIDTH, HEADS) for _ in range(depth)]).to(options.device)
        x = torch.randn(BATCH, LENGTH, WIDTH, device=options.device)
        steps, models, peaks = {}, {}, {}
        for title, how in HOWS.items():
            models[title] = model = copy.deepcopy(first)
            steps[title] = step = _step(model, optimizer := how(make(model.parameters())), x)
            step()
            trace = ms.measure(step, device=options.device, roles=training_roles(model, optimizer))
            peaks[title] = trace.growth_bytes
        took = interleaved_seconds(steps, rounds, options.device)
        print(f"{name}: {sum(p.nbytes for p in first.parameters()):,} bytes of parameters")
        for title, seconds in took.items():
            same = all(map(torch.equal, models[title].parameters(), models["plain"].parameters()))
            print(
                f"  {title:20} step {1e3 * seconds:7.1f} ms, {seconds / took['plain']:.3f} of plain   "
                f"peak above weights and states {peaks[title]:12,} bytes   bitwise equal: {same}"
            )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
