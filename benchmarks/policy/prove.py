"""What each set of techniques comes to by whole proofs, for a sample of the labelled cases.

    cd benchmarks/policy; python prove.py labels.jsonl.xz --out proven.jsonl --seconds 1800

One budget of each configuration on its first card, planned once with each set alone, as a policy would have it: peak
and time of the plan, simulations and processor seconds that finding it took, without the simulation of the step as it
is. Configurations that took long to label are left out, of which one would take as long as fifty others. `fit.py` says
how often these and the labels disagree.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from families import subject
from label import BUDGETS, SETS, append, config_of, engine_of, known

import memscale as ms

MOST_SECONDS = 3.0


def proven(family: str, seed: int, card: str) -> dict[str, Any]:
    """One case of a configuration on a card."""
    begun = time.process_time()
    engine = engine_of(subject(family, seed), card)
    identity_seconds = time.process_time() - begun
    assert engine.searches.strategies == []  # found here, and not within what is timed
    share = random.Random(f"budget {family} {seed}").choice(BUDGETS)
    taken, plain = engine.plain.taken_bytes, engine.plain.step_seconds
    assert plain
    sets = []
    for names in SETS:
        config = config_of(names)
        count, begun = engine.simulations, time.process_time()
        found = engine.searches.fastest(int(taken * share), config)
        costs = [engine.simulations - count, round(time.process_time() - begun, 3)]
        fits = (
            None
            if found is None
            else [round(found.proven.seconds / plain, 5), round(found.proven.taken_bytes / taken, 4)]
        )
        sets.append([fits, costs])
    about = {"family": family, "seed": seed, "card": card, "budget": share}
    return {**about, "identity_seconds": round(identity_seconds, 3), "sets": sets}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("labels", type=Path)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seconds", type=float, default=float("inf"))
    given = options.parse_args()
    first: dict[tuple[str, int], str] = {}
    for row in known(given.labels):
        if row["identity_seconds"] + row["trials"][1] > MOST_SECONDS:
            continue
        first.setdefault((row["family"], row["seed"]), row["card"])
    done = {(row["family"], row["seed"]) for row in known(given.out)}
    begun = time.perf_counter()
    wanted = [each for each in first if each not in done]
    random.Random(0).shuffle(wanted)
    for family, seed in wanted:
        if time.perf_counter() - begun > given.seconds:
            return
        try:
            append(given.out, proven(family, seed, first[family, seed]))
        except ms.MemscaleError as error:
            print(f"{family} {seed}: {error}", flush=True)
        print(f"{family} {seed}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
