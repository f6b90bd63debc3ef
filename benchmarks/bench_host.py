"""What the host takes for the calls of a step, where its kernels are so small that it holds up the card.

Steps of the zoo's small models, as they are and transformed: medians of the seconds that forward, backward and the
optimizer keep the host, beside how many calls of each kind (`memscale.hardware.HostSeconds`) the simulation counts in
them. The clock's defaults were fitted to such rows; `results/host-calls-h100.json` has those of an H100.

    python benchmarks/bench_host.py [--only REGEX] [--variants REGEX] [--seconds 90] [--processor] [--json FILE]

On the fake CUDA libraries of `tests/ghost`, where a step takes its host's time and no more, `--processor` counts the
process's time on the processor; `results/host-calls-fake-cuda.json` has what a policy takes there, and what
`checkpoint()` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _environment import environment
from _truth import plans
from _zoo import ZOO, Case

import memscale as ms
from memscale.core.batches import call
from memscale.hardware import Hardware, host_calls
from memscale.planning import repeated_blocks

WARM_STEPS, STEPS = 4, 15
VARIANTS = ("plain", "checkpoint", "tile", "cast", "rows", "offload", "checkpoint+offload")


def variants(case: Case, model: torch.nn.Module) -> dict[str, ms.Plan | None]:
    found = {name: plan for name, plan in plans(case, model, "fp32").items() if name in VARIANTS}
    if blocks := repeated_blocks(model):
        found["policy"] = ms.Plan(dict.fromkeys(blocks, ms.checkpoint(policy=ms.policies.dots_saveable)))
    return found


def taken(case: Case, plans: dict[str, ms.Plan | None], clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Median seconds of the host under each plan, on the card at hand, by part of the step; in turns."""
    contenders = {}
    for name, plan in plans.items():
        torch.manual_seed(0)
        own, batch = case.make("fp32", "cuda")
        contenders[name] = (own if plan is None else ms.transform(own, plan), batch, case.optimizer(own))
    turns: dict[str, list[Counter[str]]] = {name: [] for name in plans}
    for _ in range(WARM_STEPS + STEPS):
        for name in random.sample(list(contenders), len(contenders)):
            turns[name].append(turn(case, *contenders[name], clock))
    return {
        name: {part: statistics.median(each[part] for each in of[WARM_STEPS:]) for part in of[0]}
        for name, of in turns.items()
    }


def turn(
    case: Case, runs: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, clock: Callable[[], float]
) -> Counter[str]:
    """Seconds of the host for one step, by part."""
    torch.cuda.synchronize()
    parts = Counter[str]()
    for _ in range(case.accumulate):
        began = clock()
        output = call(runs, batch)
        loss = output.loss if case.loss is None else case.loss(output, batch)
        through = clock()
        loss.backward()
        parts.update(forward=through - began, backward=clock() - through)
    began = clock()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    parts["optimizer"] = clock() - began
    return parts


def counted(case: Case, plan: ms.Plan | None) -> dict[str, int]:
    """The calls of forward and backward of a steady step, by kind."""
    model, batch = case.make("fp32", "cpu")
    profiler = ms.MemoryProfiler(
        model, case.optimizer(model), loss=case.loss, plan=plan, hardware="h100", keeps_output=False
    )
    trace = profiler.simulated(batch, accumulate=case.accumulate)
    found: Counter[str] = Counter()
    for name, *given in trace.clock_events:
        if name == "begin_step":
            found.clear()
        elif name == "calls":
            found[given[0]] += 1
        elif name == "operator":
            cost, kind, _ = given
            found[kind if cost.seconds(trace.hardware) else "view"] += 1
        elif name in ("copy", "copy_in_stream", "across"):
            found["copy"] += 1
    return {kind: count for kind, count in found.items() if kind != "plain"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regex: the models whose name it finds")
    parser.add_argument("--variants", default="", help="regex: the variants whose name it finds")
    parser.add_argument("--processor", action="store_true", help="time on the processor, for the fake CUDA libraries")
    parser.add_argument("--seconds", type=float, default=90.0, help="no model is begun after so many")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    clock = time.process_time if options.processor else time.perf_counter
    hardware, until = Hardware.detect("cuda"), time.perf_counter() + options.seconds
    costs = host_calls(hardware)._asdict()
    about = environment("cuda", "transformers")
    if options.processor:
        about["device"] = "the fake CUDA libraries of tests/ghost"
    rows: list[dict[str, Any]] = []
    for name, case in ZOO.items():
        if not re.search(options.only, name) or time.perf_counter() > until:
            continue
        every = variants(case, case.make("fp32", "cpu")[0])
        under = {variant: plan for variant, plan in every.items() if re.search(options.variants, variant)}
        for variant, parts in taken(case, under, clock).items():
            row = {"model": name, "variant": variant, **parts, "calls": counted(case, under[variant])}
            said = sum(count * costs[kind] for kind, count in row["calls"].items())
            ratio = said / (row["forward"] + row["backward"])
            print(
                f"{name:16}{variant:20}{1e3 * row['forward']:8.2f}{1e3 * row['backward']:8.2f} ms{ratio:7.2f}",
                flush=True,
            )
            rows.append(row)
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
