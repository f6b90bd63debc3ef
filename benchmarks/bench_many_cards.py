"""Llama 70B and 405B on many cards: what one process's step takes, how much of it is exposed communication, and how
long the simulation of it takes.

    PYTHONPATH=. python benchmarks/bench_many_cards.py [--only REGEX] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from _environment import environment

import memscale as ms

SHAPES = {
    "70B": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "405B": {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}
PLAN = {"model.layers.*": ms.checkpoint()}
# What a process holds beside its shards is less where these are sharded on their own, and gradients die at once.
LEAN = [*PLAN.items(), ("", ms.step_in_backward())]
APART = ("model.layers.*", "model.embed_tokens", "lm_head")
# Model, processes, tokens of each, whether layers are recomputed; whether it is lean, with a fused AdamW.
CASES = [
    ("70B", 8, 4096, True, True),
    ("70B", 8, 4096, True),
    ("70B", 16, 4096, True),
    ("70B", 64, 4096, False),
    ("70B", 64, 4096, True),
    ("70B", 64, 1024, True),
    ("70B", 64, 512, True),
    ("70B", 64, 256, True),
    ("70B", 512, 4096, True),
    ("405B", 512, 4096, True),
]


def llama(name: str) -> Any:
    config = transformers.LlamaConfig(**SHAPES[name], num_key_value_heads=8, vocab_size=128256, use_cache=False)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def row(name: str, world: int, tokens: int, plan: bool, lean: bool = False) -> dict[str, Any]:
    model = llama(name)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=lean or None)
    wall, cpu = time.perf_counter(), time.process_time()
    step = ms.profile(
        model, {"input_ids": ids, "labels": ids}, optimizer=optimizer, hardware="h100", keeps_output=False,
        plan=LEAN if lean else PLAN if plan else None, parallel="fsdp2", world=world, shard=APART if lean else None,
    )  # fmt: skip
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert step.step_seconds is not None
    assert step.reserved_peak_bytes is not None
    return {
        "model": name,
        "world": world,
        "tokens": tokens,
        "recomputed": plan,
        "lean": lean,
        "reserved_gib": round(step.reserved_peak_bytes / 2**30, 1),
        "peak_gib": round(step.peak_bytes / 2**30, 1),
        "fits": step.reserved_peak_bytes <= step.hardware.usable_bytes,
        "step_seconds": round(step.step_seconds, 3),
        "exposed_percent": {
            cause: round(100 * seconds / step.step_seconds, 1) for cause, seconds in step.exposed_seconds.items()
        },
        "simulated_in_seconds": round(wall, 1),
        "of_cpu_seconds": round(cpu, 1),
        "host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression for 'model world tokens recomputed'")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if re.search(asked.only, " ".join(map(str, case))):
            rows.append(row(*case))
            print(*rows[-1].values(), flush=True)
    if asked.json is not None:
        written = {"environment": environment("cpu", "transformers"), "rows": rows}
        asked.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
