"""What the host takes for the calls of a step, where its kernels are so small that it holds up the card.

Steps of the zoo's small models, as they are and transformed: medians of the seconds that forward, backward and the
optimizer keep the host, beside how many calls of each kind (`memscale.hardware.HostSeconds`) the simulation counts in
them. The clock's defaults were fitted to such rows; `results/host-calls-h100.json` has those of an H100.

    python benchmarks/bench_host.py [--only REGEX] [--seconds 90] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from _environment import environment
from _truth import plans
from _zoo import ZOO, Case

import memscale as ms
from memscale.core.batches import call
from memscale.hardware import Hardware, HostSeconds, host_calls
from memscale.planning import repeated_blocks
from memscale.simulation.sandbox import sandbox
from memscale.simulation.schedule import clock

WARM_STEPS, STEPS = 3, 7
VARIANTS = ("plain", "checkpoint", "tile", "cast", "rows", "offload", "checkpoint+offload")


class Kind(float):
    """The seconds of a call, which know what it is."""

    name: str


def variants(case: Case, model: torch.nn.Module) -> dict[str, ms.Plan | None]:
    found = {name: plan for name, plan in plans(case, model, "fp32").items() if name in VARIANTS}
    if blocks := repeated_blocks(model):
        found["policy"] = ms.Plan(dict.fromkeys(blocks, ms.checkpoint(policy=ms.policies.dots_saveable)))
    return found


def taken(case: Case, plan: ms.Plan | None) -> dict[str, float]:
    """Median seconds of the host, on the card at hand, by part of the step."""
    torch.manual_seed(0)
    own, batch = case.make("fp32", "cuda")
    runs = own if plan is None else ms.transform(own, plan)
    optimizer = case.optimizer(own)
    turns = []
    for _ in range(WARM_STEPS + STEPS):
        torch.cuda.synchronize()
        parts = Counter[str]()
        for _ in range(case.accumulate):
            began = time.perf_counter()
            output = call(runs, batch)
            loss = output.loss if case.loss is None else case.loss(output, batch)
            through = time.perf_counter()
            loss.backward()
            parts.update(forward=through - began, backward=time.perf_counter() - through)
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parts["optimizer"] = time.perf_counter() - began
        turns.append(parts)
    return {part: statistics.median(turn[part] for turn in turns[WARM_STEPS:]) for part in turns[0]}


def counted(case: Case, plan: ms.Plan | None) -> dict[str, int]:
    """The calls of forward and backward of a steady step, by kind."""
    steps: list[Counter[str]] = []

    def kinds(hardware: Hardware) -> HostSeconds:
        found = []
        for name, seconds in host_calls(hardware)._asdict().items():
            kind = Kind(seconds)
            kind.name = name
            found.append(kind)
        return HostSeconds(*found)

    class Counting(clock.Clock):
        def begin_step(self) -> None:
            steps.append(Counter())
            super().begin_step()

        def calls(self, seconds: float) -> None:
            if isinstance(seconds, Kind):
                steps[-1][seconds.name] += 1
            super().calls(seconds)

    model, batch = case.make("fp32", "cpu")
    settings: dict[str, Any] = {"optimizer": case.optimizer(model), "loss": case.loss, "accumulate": case.accumulate}
    with mock.patch.object(clock, "host_calls", kinds), mock.patch.object(sandbox, "Clock", Counting):
        ms.profile(model, batch, keeps_output=False, plan=plan, hardware="h100", **settings)
    return {kind: count for kind, count in steps[-1].items() if kind != "plain"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regex: the models whose name it finds")
    parser.add_argument("--seconds", type=float, default=90.0, help="no model is begun after so many")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    hardware, until = Hardware.detect("cuda"), time.perf_counter() + options.seconds
    costs = host_calls(hardware)._asdict()
    about = environment("cuda", "transformers")
    rows: list[dict[str, Any]] = []
    for name, case in ZOO.items():
        if not re.search(options.only, name) or time.perf_counter() > until:
            continue
        for variant, plan in variants(case, case.make("fp32", "cpu")[0]).items():
            row = {"model": name, "variant": variant, **taken(case, plan), "calls": counted(case, plan)}
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
