"""Plans for one long row of a Llama 8B on one card, beside a plan by hand; simulated, on any machine.

    python benchmarks/bench_long_context.py                   # all cases
    python benchmarks/bench_long_context.py --only h100-128k

Each case is one row of tokens in bf16 for one card, with all weights trained (`offload_states` and `step_in_backward`
are allowed) or with LoRA. The hand plan streams and checkpoints every block, offloads what the block saves, and cuts
the MLP, the norms and the head along the sequence. `seconds` are those of the search, with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _environment import environment
from _llama import llama
from _zoo_torch import add_lora

import memscale as ms

GIB = 2**30
_CARDS = {"h100": "h100", "24gb": "rtx4090"}
CASES = {
    f"{card}-{thousands}k{'-lora' if lora else ''}": (_CARDS[card], thousands * 1024, lora)
    for card, lengths in (("24gb", (32, 64)), ("h100", (128, 256, 512)))
    for thousands in lengths
    for lora in (True, False)
}
_PIECE = 8192  # tokens in a piece of the hand plan's MLPs and norms
_HEAD_PIECE = 1024  # tokens in a piece of the hand plan's head


def by_hand(tokens: int) -> dict[str, ms.Transform]:
    pieces = ms.tile(chunks=max(4, tokens // _PIECE), in_dims=1, out_dims=1)
    cut = (
        "model.layers.*.mlp",
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.norm",
    )
    return {
        "model.layers.*": ms.compose(ms.offload(what="params"), ms.offload(), ms.checkpoint()),
        **dict.fromkeys(cut, pieces),
        "lm_head": ms.tile(chunks=max(64, tokens // _HEAD_PIECE)),
    }


def planned(card: str, tokens: int, lora: bool) -> dict[str, Any]:
    with torch.device("meta"):
        model = llama(32, 4096, 14336, 32, positions=tokens)
        if lora:
            model = add_lora(model, ("q_proj", "v_proj"), 16)
        model.to(torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    model.config.use_cache = False
    trained = [each for each in model.parameters() if each.requires_grad]
    began, used = time.perf_counter(), time.process_time()
    engine = ms.DecisionEngine(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW(trained, fused=True),
        hardware=card,
        keeps_output=False,
        config=ms.Config(mode="aggressive"),
        stepping=() if lora else ("offload_states", "step_in_backward"),
    )
    found: dict[str, Any] = {"usable_bytes": engine.hardware.usable_bytes, "plain_bytes": engine.plain.taken_bytes}
    try:
        plan = engine.plan(1.0, with_remedies=False)
        found |= {
            "planned_bytes": plan.evidence.planned.taken_bytes,
            "planned_seconds": plan.evidence.planned.step_seconds,
            "simulations": plan.evidence.simulations,
            "plan": plan.to_python(),
        }
    except ms.BudgetError as error:
        found["smallest_bytes"] = error.peak_bytes
    found |= {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - used}
    hand = engine.steps.profile(ms.Plan(by_hand(tokens)))
    return {**found, "hand_bytes": hand.taken_bytes, "hand_seconds": hand.step_seconds}


def row(found: dict[str, Any]) -> str:
    if "planned_bytes" in found:
        ours = f"planned {found['planned_bytes'] / GIB:6.1f} GiB, {found['planned_seconds']:7.1f} s a step"
    else:
        ours = f"no plan, {found['smallest_bytes'] / GIB:6.1f} GiB the smallest"
    fits = "" if found["hand_bytes"] <= found["usable_bytes"] else " (does not fit)"
    hand = f"by hand {found['hand_bytes'] / GIB:6.1f} GiB{fits}, {found['hand_seconds']:7.1f} s"
    return f"{ours}; {hand}; searched {found['processor_seconds']:4.0f} s of CPU, {found['seconds']:4.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas between: " + ", ".join(CASES))
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in [each for each in options.only.split(",") if each] or CASES:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["MEMSCALE_CACHE"] = cache
            results[name] = planned(*CASES[name])
        print(f"{name:14}", row(results[name]), flush=True)
        if options.output:  # after each, since all take half an hour
            data = {"environment": environment("cpu"), "load": os.getloadavg(), "results": results}
            options.output.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
