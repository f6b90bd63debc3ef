"""offload() without a GPU: what a hook costs, and a GPT-2 whose activations wait on disk, against PyTorch.

Every contender of the model runs in a process of its own, since freed memory is not always given back to the system.
"RSS growth" is how far a steady-state step drives the process's peak resident set above what it held after a step on
eight tokens, with gradients and optimizer state in place; the allocator's own count stands beside it.

    python benchmarks/bench_offload.py [--steps 3] [--directory DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler logs to the terminal otherwise

import torch
from bench_tile import gpt2

import memscale as ms
from memscale.profiling._allocator import measure
from memscale.runtime import Runtime

BLOCKS = "transformer.h.*"
PLANS: dict[str, dict[str, ms.Transform]] = {
    "plain": {},
    "offload the blocks": {BLOCKS: ms.offload()},
    "offload the model": {"": ms.offload()},
    "checkpoint": {BLOCKS: ms.checkpoint()},
    "offload, checkpoint": {BLOCKS: ms.compose(ms.offload(), ms.checkpoint())},
}


def resident_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def train(name: str, steps: int, directory: str | None) -> dict[str, Any]:
    """Train in this process; what a step took, and a digest of the parameters after all of them."""
    torch.manual_seed(0)
    runtime = Runtime(disk_directory=directory)
    base = gpt2("cpu")
    model = ms.transform(base, PLANS.get(name, {}), runtime=runtime)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 16_000, (4, 512))

    def step(ids: torch.Tensor = ids) -> None:
        with torch.autograd.graph.save_on_cpu() if name == "save_on_cpu" else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(ids[:1, :8])  # libraries, gradients and optimizer state are there before the first measurement
    before = resident_bytes("VmRSS")
    seconds, growth = [], []
    for _ in range(steps):
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak of the resident set starts over
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        growth.append(resident_bytes("VmHWM") - before)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    moved = runtime.stats().get("cpu")
    return {
        "seconds": statistics.median(seconds),
        "rss_growth_bytes": growth[-1],
        "allocator_growth_bytes": measure(step).growth_bytes,
        "out_bytes": sum(moved.out_bytes.values()) / steps if moved else 0,
        "exposed_seconds": moved.exposed_seconds / steps if moved else 0.0,
        "digest": digest,
    }


def overhead_microseconds(saved: int = 100, rounds: int = 300) -> dict[str, float]:
    """What a saved tensor costs, forward and backward, when every tensor is too small to move."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(saved // 2):
            x = x * w  # saves two
        return x

    def theirs(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return chain(x)

    contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": chain,
        "offload": ms.offload()(chain),
        "save_on_cpu": theirs,
    }
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run(x).sum().backward()
            took[name].append(time.perf_counter() - start)
    plain = statistics.median(took["plain"])
    return {name: 1e6 * (statistics.median(took[name]) - plain) / saved for name in contenders if name != "plain"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--directory")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(train(options.contender, options.steps, options.directory)))
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, cpu")
    for name, cost in overhead_microseconds().items():
        print(f"  {name:20} {cost:5.2f} us for a saved tensor below min_bytes, forward and backward")
    torch.set_num_threads(threads)
    print("\nGPT-2 shape, 8 layers, width 512, vocabulary 16 000, 4 x 512 tokens, fp32, AdamW")
    plain: dict[str, Any] = {}
    for name in (*PLANS, "save_on_cpu"):
        command = [sys.executable, __file__, "--contender", name, "--steps", str(options.steps)]
        command += ["--directory", options.directory] if options.directory else []
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        plain = plain or found
        print(
            f"  {name:20} RSS growth {found['rss_growth_bytes'] / 1e6:7.1f} MB "
            f"({found['rss_growth_bytes'] / plain['rss_growth_bytes']:.3f})   "
            f"allocator {found['allocator_growth_bytes'] / 1e6:7.1f} MB "
            f"({found['allocator_growth_bytes'] / plain['allocator_growth_bytes']:.3f})   "
            f"step {found['seconds']:6.3f} s ({found['seconds'] / plain['seconds']:.2f})   "
            f"moved {found['out_bytes'] / 1e6:6.1f} MB, {found['exposed_seconds']:.3f} s exposed   "
            f"{'same bits' if found['digest'] == plain['digest'] else 'OTHER NUMBERS'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
