"""Plans against their budgets on the real CPU allocator, and against what else one would do to use less memory.

    python benchmarks/bench_plan.py                  # realised peak over budget: eight architectures, ten budgets each
    python benchmarks/bench_plan.py --peers          # step times beside torch.utils.checkpoint on blocks, interleaved
    python benchmarks/bench_plan.py --only gpt2,unet --budgets 4

A budget is met if neither the first step nor a later one takes more, by `torch.profiler`'s allocation events. The table
says how much of each budget is used, and what a step takes beside the step as it is by the simulation's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _environment import environment
from _zoo import ZOO, Case
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms
from memscale.core import call, matches, scalar_loss
from memscale.planning import repeated_blocks, taken_bytes
from memscale.simulation.measured import training_roles

MODELS = ("gpt2", "mixtral", "bert", "t5", "vit", "resnet", "unet", "lstm")
PEERS = ("gpt2", "bert", "vit", "convnet")


def steps_of(case: Case, model: torch.nn.Module, batch: object) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    optimizer = case.make_optimizer(model.parameters())

    def step() -> None:
        scalar_loss(call(model, batch), batch, case.loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, optimizer


def realised_bytes(case: Case, model: torch.nn.Module, batch: object) -> int:
    """The peak of the first step and of the third, whichever is larger."""
    step, optimizer = steps_of(case, model, batch)
    roles = training_roles(model, optimizer, batch)
    first = ms.measure(step, roles=roles).peak_bytes
    step()
    return max(first, ms.measure(step, roles=roles).peak_bytes)


def kept_budgets(name: str, budgets: int) -> list[dict[str, float]]:
    case = ZOO[name]
    model, batch = case.make("fp32")
    began = time.perf_counter()
    engine = ms.DecisionEngine(model, batch, optimizer=case.make_optimizer(model.parameters()), loss=case.loss)
    curve = engine.frontier(2)
    least, most = curve[0].peak_bytes, taken_bytes(engine.plain)
    print(f"{name}: {most / 1e6:.1f} MB as it is, {least / 1e6:.1f} MB at least ({time.perf_counter() - began:.1f} s)")
    rows = []
    for at in range(budgets):
        budget = int(least + (most - least) * (at + 0.5) / budgets)
        plan = engine.plan(budget)
        realised = realised_bytes(case, ms.transform(model, plan), batch)
        pace = plan.evidence.planned.step_seconds / plan.evidence.plain.step_seconds
        rows.append({"budget_bytes": budget, "realised_bytes": realised, "pace": pace, "rules": len(plan)})
        verdict = "" if realised <= budget else "  OVER"
        print(f"  {budget / 1e6:8.1f} MB  used {realised / budget:7.2%}  step x {pace:.3f}{verdict}", flush=True)
    return rows


def beside_peers(name: str, rounds: int = 7) -> dict[str, float]:
    """Per-block `torch.utils.checkpoint`, and our fastest plan that takes no more than it does."""
    case = ZOO[name]
    peer, batch = case.make("fp32")
    paths = [path for path, _ in peer.named_modules() if any(matches(each, path) for each in repeated_blocks(peer))]
    for path in paths:
        block = peer.get_submodule(path)
        block.forward = lambda *args, _own=block.forward, **kwargs: torch_checkpoint(
            _own, *args, use_reentrant=False, **kwargs
        )
    budget = realised_bytes(case, peer, batch)
    model, _ = case.make("fp32")
    engine = ms.DecisionEngine(
        model,
        batch,
        optimizer=case.make_optimizer(model.parameters()),
        loss=case.loss,
        hardware=ms.Hardware.measure("cpu"),
    )
    ours = ms.transform(model, engine.plan(budget))
    runs = {"torch": steps_of(case, peer, batch)[0], "plan": steps_of(case, ours, batch)[0]}
    times: dict[str, list[float]] = {key: [] for key in runs}
    for at in range(rounds + 1):
        for key, step in runs.items():
            began = time.perf_counter()
            step()
            if at:
                times[key].append(time.perf_counter() - began)
    ratio = statistics.median(one / other for one, other in zip(times["plan"], times["torch"], strict=True))
    used = realised_bytes(case, ours, batch) / budget
    print(f"{name}: at the peak of torch.utils.checkpoint ({budget / 1e6:.1f} MB): step x {ratio:.3f}, used {used:.2%}")
    return {"budget_bytes": budget, "time_ratio": ratio, "used": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of the zoo, with commas between")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or (PEERS if options.peers else MODELS)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMSCALE_CACHE"] = cache  # what was planned on another day says nothing about today's planner
        found = {name: beside_peers(name) if options.peers else kept_budgets(name, options.budgets) for name in names}
    if options.output:
        options.output.write_text(json.dumps({"environment": environment("cpu"), "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
