"""The pictures of memory over time in the documentation: one training step under each transform.

python benchmarks/plot_memory.py  # writes docs/images/checkpoint.png, tile.png and cast.png
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler logs to the terminal otherwise

import torch
import torch.nn.functional as F
from _blocks import TransformerBlock
from torch import nn

import memscale as ms
from memscale.reports.plot import plot_timelines
from memscale.simulation.measured.allocator_trace import AllocatorTrace, training_roles

IMAGES = Path(__file__).parents[1] / "docs" / "images"
VOCABULARY = 8192


def language_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [TransformerBlock(256, 4) for _ in range(6)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 256), *blocks, nn.Linear(256, VOCABULARY))


def trace(plan: Mapping[str, ms.Transform]) -> AllocatorTrace:
    """The second step of training under `plan`, when the optimizer has its moments."""
    model = ms.transform(language_model(), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (8, 128))

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return ms.measure(step, roles=training_roles(model, optimizer, tokens))


def main() -> None:
    each = [str(index) for index in range(1, 7)]
    plans: dict[str, dict[str, dict[str, ms.Transform]]] = {
        "checkpoint": {"as it is": {}, "checkpoint()": {path: ms.checkpoint() for path in each}},
        "tile": {
            "as it is": {},
            "tiled head": {"7": ms.tile(size=64)},
            "tiled blocks and head": {**{path: ms.tile(chunks=8) for path in each}, "7": ms.tile(size=64)},
        },
        "cast": {
            "as it is": {},
            "cast()": {"": ms.cast()},
            "checkpoint() around cast()": {path: ms.compose(ms.checkpoint(), ms.cast()) for path in (*each, "7")},
        },
    }
    IMAGES.mkdir(exist_ok=True)
    for name, panels in plans.items():
        traces = {title: trace(plan) for title, plan in panels.items()}
        plot_timelines(IMAGES / f"{name}.png", traces)
        print(IMAGES.name, f"{name}.png", {title: found.peak_bytes for title, found in traces.items()})


if __name__ == "__main__":
    main()
