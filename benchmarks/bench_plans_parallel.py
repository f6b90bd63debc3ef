"""Plans of FSDP2 in real processes: does each process keep to the budget, and are the numbers those without a plan?

Every process shards the model; the first, which has the most where shards differ, plans it for a share of what its step
takes as it is, and sends the plan to the others. Each makes the model anew, applies the plan, shards, and trains three
steps, whose peak the allocator's events tell. The processes compare their plans.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/bench_plans_parallel.py [--only REGEX] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _environment import environment
from bench_parallel import MODELS, POLICIES, plan_paths, prepare, under

import memscale as ms
from tests.support.whole_run import true_peaks

SHARES = (0.85, 0.7, 0.55)  # of what the step takes without a plan


def made(name: str, policy: str, plan: ms.Plan | None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    paths = plan_paths(model)
    if plan:
        model = ms.transform(model, plan)
    model = under("fsdp2", policy)(model, [model.get_submodule(path) for path in paths])
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4)


def trained(name: str, policy: str, plan: ms.Plan | None) -> tuple[int, list[float]]:
    """The peak of three steps, and their losses."""
    losses: list[float] = []

    def make_step() -> Callable[[], None]:
        model, batch, optimizer = made(name, policy, plan)

        def step() -> None:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())

        return step

    return max(true_peaks(make_step)), losses


def row(name: str, policy: str, share: float) -> dict[str, Any]:
    model, batch, optimizer = made(name, policy, None)
    sent: list[Any] = [None, None]
    if dist.get_rank() == 0:
        budget = int(share * ms.profile(model, batch, keeps_output=False, optimizer=optimizer).peak_bytes)
        try:
            sent = [budget, ms.plan(model, batch, keeps_output=False, optimizer=optimizer, budget=budget)]
        except ms.BudgetError as error:
            sent = [budget, error.peak_bytes]
    dist.broadcast_object_list(sent, src=0)
    budget, plan = sent
    found: dict[str, Any] = {"model": name, "policy": policy, "share": share, "budget_bytes": budget}
    if isinstance(plan, int):
        return found | {"smallest_bytes": plan}
    del model, optimizer
    peak, losses = trained(name, policy, plan)
    plain_peak, plain_losses = trained(name, policy, None)
    return found | {
        "planned_bytes": plan.evidence.planned.peak_bytes,
        "measured_bytes": peak,
        "measured_plain_bytes": plain_peak,
        "keeps": peak <= budget < plain_peak,
        "tiled": "tile(" in repr(plan),
        "largest_difference_of_losses": max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression for 'model policy share'")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    prepare()
    dist.init_process_group("gloo")
    rows = []
    for name in ("GPT-2", "Llama", "BERT"):
        for policy in POLICIES:
            for share in SHARES:
                if not re.search(asked.only, f"{name} {policy} {share}"):
                    continue
                mine = row(name, policy, share)
                of_all: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(of_all, mine)
                rows += [{"rank": rank, **each} for rank, each in enumerate(of_all)]
                if dist.get_rank() == 0:
                    print(*(str(each) for each in of_all), sep="\n", flush=True)
    if dist.get_rank() == 0 and asked.json is not None:
        written = {"environment": environment("cpu", "transformers"), "processes": dist.get_world_size(), "rows": rows}
        asked.json.write_text(json.dumps(written, indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # threads of gloo may abort the interpreter's own exit


if __name__ == "__main__":
    main()
