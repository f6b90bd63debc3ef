"""How long memscale itself takes: a simulated step, and planning, in processor seconds beside the targets.

    python benchmarks/bench_simulate.py                            # profiles of Llama 8B and 70B shapes with each plan
    python benchmarks/bench_simulate.py --plan                     # planning, for two budgets each
    python benchmarks/bench_simulate.py --plan --only llama-405b
    python benchmarks/bench_simulate.py --long                     # plans of a Llama 8B for one long row on one card

Models are on meta, the device is an H100, the optimizer AdamW. Processor time of the process, one thread: what else the
machine does counts only where it slows the processor down.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _environment import environment
from _llama import llama

import memscale as ms

# Layers, width, width of the MLP, heads; the seconds that a profile and a plan may take.
SHAPES = {
    "llama-8b": ((32, 4096, 14336, 32), 1.5, 10.0),
    "llama-70b": ((80, 8192, 28672, 64), 4.0, 30.0),
    "llama-405b": ((126, 16384, 53248, 128), None, 60.0),
}
GPT2_PLAN_SECONDS = 3.0
PROFILED = ("llama-8b", "llama-70b")
PLANNED = ("gpt2", *SHAPES)
BUDGETS = (0.75, 0.5)  # of what the step takes as it is
LONG_ROWS, LONG_SECONDS = (2**17, 2**18, 2**19), 60.0  # tokens, and for each the seconds after which the search ends


def built(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], str]:
    """The model, a batch, and the path of its blocks."""
    with torch.device("meta"):
        if name == "gpt2":
            tokens = torch.zeros(4, 512, dtype=torch.long)
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
            return model, {"input_ids": tokens, "labels": tokens}, "transformer.h.*"
        tokens = torch.zeros(1, 4096, dtype=torch.long)
        model = llama(*SHAPES[name][0]).to(torch.bfloat16)
        return model, {"input_ids": tokens, "labels": tokens}, "model.layers.*"


def plans(blocks: str) -> dict[str, dict[str, ms.Transform] | None]:
    return {
        "plain": None,
        "checkpoint": {blocks: ms.checkpoint()},
        "offload": {blocks: ms.offload()},
        "offload+checkpoint": {blocks: ms.compose(ms.offload(), ms.checkpoint())},
        "tile head": {"lm_head": ms.tile(chunks=16)},
        "params": {blocks: ms.offload(what="params")},
        "params+checkpoint": {blocks: ms.compose(ms.offload(what="params"), ms.checkpoint())},
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def profiles(name: str, rounds: int) -> dict[str, float]:
    """The median over the rounds, in which the plans take turns; the first round warms up and does not count."""
    model, batch, blocks = built(name)
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, list[float]] = {key: [] for key in plans(blocks)}
    for number in range(rounds + 1):
        for key, plan in plans(blocks).items() if number else [("", None)]:
            seconds, _ = timed(
                lambda plan=plan: ms.profile(
                    model, batch, keeps_output=False, optimizer=optimizer, plan=plan, hardware="h100"
                )
            )
            if number:
                found[key].append(seconds)
    medians = {key: statistics.median(times) for key, times in found.items()}
    for key, seconds in medians.items():
        print(f"{name:<11} {key:<19} {seconds:5.2f} s   target {SHAPES[name][1]} s", flush=True)
    return medians


def planning(name: str) -> dict[str, float]:
    """Each budget from the beginning, simulations of the step as it is and of candidates included."""
    model, batch, _ = built(name)
    optimizer = torch.optim.AdamW(model.parameters())
    target = GPT2_PLAN_SECONDS if name == "gpt2" else SHAPES[name][2]
    found = {}
    most = ms.profile(model, batch, keeps_output=False, optimizer=optimizer, hardware="h100").taken_bytes
    for share in BUDGETS:
        engine: list[ms.DecisionEngine] = []

        def run(share: float = share, engine: list[ms.DecisionEngine] = engine) -> ms.Plan:
            engine.append(ms.DecisionEngine(model, batch, keeps_output=False, optimizer=optimizer, hardware="h100"))
            return engine[0].plan(int(share * most))

        seconds, plan = timed(run)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        pace = plan.evidence.planned.step_seconds / plan.evidence.plain.step_seconds
        print(
            f"{name:<11} for {share:.0%} of its memory: {seconds:5.1f} s   target {target} s   "
            f"{engine[0].simulations} simulations, step x {pace:.3f}, process at most {peak_mib} MiB",
            flush=True,
        )
        found[f"{share:.0%}"] = seconds
    return found


def long_row(count: int) -> dict[str, float]:
    """The plan of a Llama 8B with so many tokens in one row, whose rows may be cut, within what an H100 gives."""
    with torch.device("meta"):
        model = llama(*SHAPES["llama-8b"][0], positions=count).to(torch.bfloat16)
        model.config.use_cache = False
        tokens = torch.zeros(1, count, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    step = {"optimizer": torch.optim.AdamW(model.parameters(), fused=True), "hardware": "h100", "exact": False}
    seconds, plan = timed(lambda: ms.plan(model, batch, "78.6GiB", seconds=LONG_SECONDS, **step))
    planned = plan.evidence.planned
    print(
        f"{count:>7,} tokens: {seconds:5.1f} s   target {LONG_SECONDS} s   "
        f"{planned.taken_bytes / 2**30:.1f} of 78.6 GiB, a step in {planned.step_seconds:.1f} s",
        flush=True,
    )
    return {"seconds": seconds, "taken_bytes": planned.taken_bytes, "step_seconds": planned.step_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {', '.join(PLANNED)}, with commas between")
    parser.add_argument("--rounds", type=int, default=3, help="of profiles; their median counts")
    parser.add_argument("--plan", action="store_true", help="time planning")
    parser.add_argument("--long", action="store_true", help="plans for one long row")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["MEMSCALE_CACHE"] = ""  # where plans of before would be found
    names = [name for name in options.only.split(",") if name] or (PLANNED if options.plan else PROFILED)
    if options.long:
        found = {str(count): long_row(count) for count in LONG_ROWS}
    else:
        found = {name: planning(name) if options.plan else profiles(name, options.rounds) for name in names}
    if options.output:
        options.output.write_text(json.dumps({"environment": environment("cpu"), "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
