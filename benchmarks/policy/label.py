"""What each set of techniques comes to, for configurations, cards and budgets: a line of JSON for each case.

    python benchmarks/policy/label.py --out benchmarks/policy/labels.jsonl --seeds 6 --seconds 1800

A run that is stopped goes on where it was. Infeasible is a flag, and never a number.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ["MEMSCALE_CACHE"] = ""  # a plan that is known already says nothing of how long it takes

from families import FAMILIES, subject

import memscale as ms
from memscale.planning import taken_bytes
from memscale.policy import TECHNIQUES, StrategyContext, rule

CARDS = (
    "v100-16",
    "t4",
    "a10",
    "a100-40",
    "a100-80",
    "rtx-3090",
    "l4",
    "rtx-4090",
    "h100",
    "h100-pcie",
    "b200",
    "rtx-5090",
)
BUDGETS = (0.95, 0.85, 0.7, 0.55, 0.4, 0.3)  # of what the step takes
SETS = tuple(
    "+".join(each for each in TECHNIQUES if each in chosen)
    for size in range(1, 4)
    for chosen in itertools.combinations(TECHNIQUES, size)
)


def config_of(names: str) -> ms.Config:
    chosen = names.split("+")
    return ms.Config(
        enable_checkpointing="checkpoint" in chosen,
        enable_tiling="tile" in chosen,
        enable_offloading="offload" in chosen,
    )


def cases(family: str, seed: int, card: str, budgets: tuple[float, ...]) -> list[dict[str, Any]]:
    """The cases of one configuration on one card."""
    given = subject(family, seed)
    begun = time.perf_counter()
    whole = ms.DecisionEngine(
        given.model, given.batch[0], optimizer=given.optimizer, loss=lambda y, b: given.loss(y, (b,)), hardware=card
    )
    identity_seconds = time.perf_counter() - begun
    taken = taken_bytes(whole.plain)
    limits = [int(taken * share) for share in budgets]
    found: dict[int, dict[str, Any]] = {limit: {} for limit in limits}
    for names in SETS:
        engine = copy.copy(whole)
        engine._allowed, engine._searches, engine._stepping = config_of(names), None, {}
        engine.steps.count = 0
        begun = time.perf_counter()
        assert engine.searches  # the candidates, tried once for all budgets
        trying, tried = time.perf_counter() - begun, engine.simulations
        for limit in limits:
            engine.simulations, begun = 0, time.perf_counter()
            best = engine._fastest(limit)
            seconds = time.perf_counter() - begun
            found[limit][names] = {
                "feasible": best is not None,
                "peak_bytes": None if best is None else best.proven.taken_bytes,
                "step_seconds": None if best is None else best.proven.seconds,
                "planning_seconds": round(trying + seconds, 4),
                "simulations": tried + engine.simulations,
            }
    config = ms.Config(mode="aggressive")
    rows = []
    for share, limit in zip(budgets, limits, strict=True):
        context = StrategyContext.of(whole.plain, whole.hardware, limit, config)
        rows.append(
            {
                "family": family,
                "seed": seed,
                "card": card,
                "budget": share,
                "plain_seconds": whole.plain.step_seconds,
                "identity_seconds": round(identity_seconds, 4),
                "features": context.features(),
                "rule": "+".join(rule(context)),
                "sets": found[limit],
            }
        )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=25)
    options.add_argument("--families", nargs="*", default=FAMILIES)
    options.add_argument("--cards", type=int, default=12, help="how many of the cards a configuration is planned for")
    options.add_argument("--budgets", type=int, default=6, help="how many of the budgets")
    options.add_argument("--seconds", type=float, default=float("inf"))
    given = options.parse_args()
    done = set()
    if given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
        done = {(row["family"], row["seed"], row["card"]) for row in rows}
    begun = time.perf_counter()
    for seed in range(given.seeds):
        for family in given.families:
            draw = random.Random(f"cards {family} {seed}")
            cards = draw.sample(CARDS, given.cards)
            budgets = tuple(sorted(draw.sample(BUDGETS, given.budgets), reverse=True))
            for card in cards:
                if (family, seed, card) in done:
                    continue
                if time.perf_counter() - begun > given.seconds:
                    return
                try:
                    rows = cases(family, seed, card, budgets)
                except ms.MemscaleError as error:
                    print(f"{family} {seed} on {card}: {error}", flush=True)
                    continue
                with open(given.out, "a", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(row, sort_keys=True)}\n" for row in rows)
                print(f"{family} {seed} on {card}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
