"""The picture of the offload runtime in the documentation: one step on the adversarial device, by its virtual clock.

The engine, the order of copies and every wait are real; only time is not. Each block computes for 4 ms forward and 8 ms
backward, and the link carries 1 GB/s in each direction.

python benchmarks/plot_offload.py  # writes docs/images/offload.png
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime

sys.path.insert(0, str(Path(__file__).parents[1]))  # the device is the tests' own
from tests.support.adversarial_device import AdversarialDevice, LinkSpeed

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "offload.png"
BLOCKS, WIDTH, ROWS = 6, 512, 1024
FORWARD_SECONDS, BACKWARD_SECONDS = 4e-3, 8e-3
LINK = LinkSpeed(bytes_per_second=1e9, latency_seconds=0.0)
INPUT_BYTES, WEIGHT_BYTES = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH
COLORS = {"compute": "tab:blue", "parameters": "tab:orange", "input": "tab:green", "gradient": "tab:red"}
Span = tuple[float, float, str]


class Recorded:
    """A device, and when each block computed on it."""

    def __init__(self, device: AdversarialDevice) -> None:
        self.device = device
        self.spans: list[Span] = []

    def compute(self, seconds: float, label: str) -> None:
        self.spans.append((self.device.now, self.device.now + seconds, label))
        self.device.compute(seconds)


class Computing(torch.autograd.Function):
    """Lets the device's clock run for as long as a block computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorded: Recorded, number: int) -> torch.Tensor:
        ctx.recorded, ctx.number = recorded, number
        recorded.compute(FORWARD_SECONDS, f"{number}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.recorded.compute(BACKWARD_SECONDS, f"{ctx.number}'")
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, recorded: Recorded, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.recorded, self.number = recorded, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Computing.apply(self.linear(x), self.recorded, self.number)


def step() -> tuple[list[Span], list[dict[str, Any]]]:
    """What the compute stream did in the third step, and the copies and waits of it."""
    device = AdversarialDevice(lambda n: 0, {"pinned": 1 << 28}, link=LINK)
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=1), backend=device)
    recorded = Recorded(device)
    stack = nn.Sequential(*[Block(recorded, number) for number in range(1, BLOCKS + 1)])
    how = ms.compose(ms.offload(), ms.offload(what="params"))
    fit = ms.transform(stack, {"*": how}, runtime=runtime)
    for _ in range(3):
        recorded.spans.clear()
        with runtime.record() as timeline:
            fit(torch.randn(ROWS, WIDTH)).sum().backward()
        stack.zero_grad()
    return recorded.spans, [event for event in timeline.to_data()["traceEvents"] if event["ph"] == "X"]


def kind_of(event: dict[str, Any]) -> str:
    if event["args"]["nbytes"] == INPUT_BYTES:
        return "input"
    return "gradient" if event["name"].startswith("to ") else "parameters"


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spans, events = step()
    zero = min(start for start, _, _ in spans)
    figure, axes = plt.subplots(figsize=(11, 2.6), layout="constrained")
    for start, stop, label in spans:
        axes.barh(2, 1e3 * (stop - start), left=1e3 * (start - zero), color=COLORS["compute"], edgecolor="white")
        axes.text(1e3 * ((start + stop) / 2 - zero), 2, label, ha="center", va="center", color="white", fontsize=8)
    for event in events:
        if event["name"] == "waiting":
            continue
        row, left = (1, 0)[event["name"].startswith("from ")], event["ts"] / 1e3 - 1e3 * zero
        axes.barh(row, event["dur"] / 1e3, left=left, color=COLORS[kind_of(event)], edgecolor="white")
    axes.set_yticks([2, 1, 0], ["compute", "out", "in"])
    axes.set_xlabel("milliseconds of the device's virtual clock")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()],
        labels=["compute", "parameters", "activations", "gradients"],
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.25),
        frameon=False,
    )
    IMAGE.parent.mkdir(exist_ok=True)
    figure.savefig(IMAGE, dpi=120)
    waited = sum(event["dur"] for event in events if event["name"] == "waiting") / 1e3
    print(f"{IMAGE.name}: {max(stop for _, stop, _ in spans) * 1e3 - zero * 1e3:.1f} ms, of which waiting {waited:.1f}")


if __name__ == "__main__":
    main()
