"""What each set of techniques comes to, for configurations, cards and budgets, as far as a solver sees.

    cd benchmarks/policy; python label.py --out labels.jsonl.xz --seconds 1800

A line of JSON for each configuration on each card, in a file that may be compressed (.xz). Its candidates are simulated
once; then for each budget and each set of techniques a solver chooses among them, and the step that it chose is not
simulated: `prove.py` does that for a sample. Infeasible is null, and never a number. A run that is stopped goes on
where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import lzma
import os
import random
import time
from pathlib import Path
from typing import IO, Any

os.environ["MEMSCALE_CACHE"] = ""  # a plan that is known already says nothing of how long it takes

import torch
from families import FAMILIES, Subject, subject
from torch import nn

import memscale as ms
from memscale.planning.parts.parts import parts_of
from memscale.planning.search.effort import Effort
from memscale.planning.search.search import Search
from memscale.planning.trials.trials import TrialSteps
from memscale.policy import TECHNIQUES, StrategyContext
from memscale.simulation import Trace, attribute

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
# The simplest first: each set after those that it contains.
SETS = tuple(
    "+".join(each for each in TECHNIQUES if each in chosen)
    for size in range(1, 4)
    for chosen in itertools.combinations(TECHNIQUES, size)
)
ALLOWED = ms.Config(mode="aggressive")


def config_of(names: str) -> ms.Config:
    """The config with the techniques of a set, and no other."""
    chosen = names.split("+")
    return ms.Config(
        enable_checkpointing="checkpoint" in chosen,
        enable_tiling="tile" in chosen,
        enable_offloading="offload" in chosen,
    )


def engine_of(given: Subject, card: str, config: ms.Config | None = None) -> ms.DecisionEngine:
    """A planner that has simulated the step as it is, and nothing else."""
    step = {"optimizer": given.optimizer, "loss": lambda output, batch: given.loss(output, (batch,)), "hardware": card}
    return ms.DecisionEngine(given.model, given.batch[0], keeps_output=False, config=config, **step)


def cards_of(family: str, seed: int, count: int) -> list[str]:
    """The cards that a configuration is planned for."""
    return random.Random(f"cards {family} {seed}").sample(CARDS, len(CARDS))[:count]


class Counted:
    """Stands for simulated trials, and counts them; each has the trace of the step as it is."""

    def __init__(self, plain: Trace) -> None:
        self.plain, self.count = plain, 0

    def __call__(self, rules: Any, away: frozenset[str]) -> Trace:
        self.count += 1
        return self.plain


def trial_steps(search: Search, among: frozenset[str]) -> int:
    """How many simulations the trials of these techniques take, if no candidate has to be turned down."""
    menu = dataclasses.replace(search.menu, techniques=search.menu.techniques & among)
    parts = parts_of(search._model, search.plain, tiles=menu.tiles)
    menus = [menu.for_part(part, search.plain) for part in parts]
    menus.append(menu.for_outside(search._model, parts, search.plain))
    base, stub = attribute(search.plain, [part.path for part in parts]), Counted(search.plain)
    TrialSteps(base, parts, menus, stub).run({}, Effort.of(len(search.plain.last_operators)).trials)
    return stub.count


def labels(given: Subject, seed: int, card: str) -> dict[str, Any]:
    """The line of one configuration on one card."""
    begun = time.process_time()
    engine = engine_of(given, card, ALLOWED)
    identity_seconds = time.process_time() - begun
    (search,) = engine.searches.own
    simulated, begun = engine.simulations, time.process_time()
    chooser = search._chooser  # by the trials
    trial_seconds = time.process_time() - begun
    trials = engine.simulations - simulated
    taken, plain = engine.plain.taken_bytes, engine.plain.step_seconds
    assert plain
    cases = []
    for share in BUDGETS:
        limit = int(taken * share)
        context = StrategyContext.of(engine.plain, engine.hardware, limit, ALLOWED)
        found: dict[str, tuple[float, float] | None] = {}
        for names in SETS:
            among = engine.searches.techniques(config_of(names))
            # More techniques are never slower: what the solver finds among fewer of them counts, too.
            chosen = [each for fewer, each in found.items() if each and set(fewer.split("+")) <= set(names.split("+"))]
            if (choice := chooser.fastest(limit, among)) is not None:
                seconds, held = chooser.seconds(choice.assignment), chooser.held_bytes(choice.assignment)
                chosen.append((round(seconds / plain, 5), round(held / taken, 4)))
            found[names] = min(chosen, default=None)
        cases.append([share, list(context.features().values()), [found[names] for names in SETS]])
    return {
        "family": given.family,
        "seed": seed,
        "card": card,
        "parameters": sum(each.numel() for each in engine.model.parameters()),
        "plain": [plain, taken],
        "identity_seconds": round(identity_seconds, 3),
        "trials": [trials, round(trial_seconds, 3)],
        "steps": [trial_steps(search, engine.searches.techniques(config_of(names))) for names in SETS],
        "cases": cases,
    }


def runs_cells(given: Subject, card: str) -> bool:
    """Whether it is a recurrence for which cuDNN has nothing on this card: each cell is a dozen operators."""
    rows = [each for each in given.model.modules() if isinstance(each, nn.RNNBase)]
    capability = ms.Hardware.named(card).capability
    assert capability is not None
    return capability < (8, 0) and any(p.dtype == torch.bfloat16 for each in rows for p in each.parameters())


def opened(path: Path, mode: str) -> IO[str]:
    """A file of lines, compressed or not."""
    return (lzma.open if path.suffix == ".xz" else open)(path, mode, encoding="utf-8")  # type: ignore[operator, no-any-return]


def append(out: Path, row: dict[str, Any]) -> None:
    """A line more."""
    with opened(out, "at") as file:
        file.write(f"{json.dumps(row, separators=(',', ':'))}\n")


def known(out: Path) -> list[dict[str, Any]]:
    """The lines that are there."""
    if not out.exists():
        return []
    with opened(out, "rt") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=27)
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument(
        "--cards", type=int, default=len(CARDS), help="on how many cards each configuration is planned"
    )
    options.add_argument("--seconds", type=float, default=float("inf"))
    given = options.parse_args()
    done = {(row["family"], row["seed"], row["card"]) for row in known(given.out)}
    begun = time.perf_counter()
    # A card for each configuration, and then the next: what is sampled are configurations.
    for number in range(given.cards):
        for seed, family in itertools.product(range(given.first_seed, given.seeds), FAMILIES):
            card = cards_of(family, seed, given.cards)[number]
            if (family, seed, card) in done:
                continue
            if time.perf_counter() - begun > given.seconds:
                return
            configuration = subject(family, seed)
            if runs_cells(configuration, card):
                print(f"{family} {seed} on {card}: not labelled, cells run one by one", flush=True)
                continue
            try:
                append(given.out, labels(configuration, seed, card))
            except ms.MemscaleError as error:
                print(f"{family} {seed} on {card}: {error}", flush=True)
            print(f"{family} {seed} on {card}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
