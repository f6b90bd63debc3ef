"""What memscale costs before a step: its import, `transform` of a large model, and a plan with no rules.

python benchmarks/bench_startup.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import memscale as ms


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each, one of each in every round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {name: statistics.median(values) for name, values in found.items()}


# The first name begins with `import torch`; timed apart in one process, both meet the same moment of the machine.
IMPORTS = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
from memscale import checkpoint, transform
print(between - start, time.perf_counter() - start)
"""


def import_seconds() -> tuple[float, float]:
    """The time that a fresh interpreter takes to import torch, and torch and memscale, from bytecode."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True, env=environment)
    torch_seconds, both_seconds = map(float, run.stdout.split())
    return torch_seconds, both_seconds


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="for `make bench ARGS=...`; nothing here runs on a device")
    rounds = parser.parse_args().rounds

    import_seconds()  # writes the bytecode
    pairs = [import_seconds() for _ in range(rounds)]
    torch_seconds, both_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"import: torch {torch_seconds:.3f} s, memscale {both_seconds:.3f} s", end="   ")
    print(f"ratio {statistics.median(both / alone for alone, both in pairs):.3f}")

    model = llama(80)
    plan = ms.Plan({"model.layers.*": ms.checkpoint()})
    took = interleaved({"transform": lambda: seconds(lambda: ms.transform(model, plan))}, rounds)
    print(f"transform of an 80-layer Llama on meta: {1e3 * took['transform']:.1f} ms")

    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    empty, x = ms.transform(block, {}), torch.ones(2, 8)
    calls = {
        name: lambda module=module: seconds(lambda: [module(x) for _ in range(1000)]) / 1000
        for name, module in {"plain": block, "empty plan": empty}.items()
    }
    took = interleaved(calls, 10 * rounds)
    print(
        f"a call: plain {1e6 * took['plain']:.2f} us, under an empty plan {1e6 * took['empty plan']:.2f} us", end="   "
    )
    print(f"ratio {took['empty plan'] / took['plain']:.3f}")


if __name__ == "__main__":
    main()
