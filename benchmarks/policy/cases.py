"""Labelled and proven cases, and what planning one of them by a policy's answer comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from label import SETS, known

from memscale.policy import FEATURES, TECHNIQUES, StrategyContext, rule

ALL = "+".join(TECHNIQUES)
LOSES_NOTHING, NEAR = 1.01, 1.02

Key = tuple[str, int, str, float]


@dataclass(frozen=True)
class Case:
    """One configuration on one card under one budget.

    Attributes:
        key: family, seed, card, share of what the step takes.
        features: as of `StrategyContext`.
        times: of the plan with each set alone, over that of the step as it is; None where none fits.
        costs: of finding it: simulations, or seconds.
    """

    key: Key
    features: tuple[int, ...]
    times: dict[str, float | None]
    costs: dict[str, float]

    @property
    def configuration(self) -> str:
        """What cases are resampled by."""
        return f"{self.key[0]} {self.key[1]}"

    @cached_property
    def rules(self) -> str:
        """What the rules answer."""
        named = dict(zip(FEATURES, self.features, strict=True))
        return "+".join(rule(StrategyContext(**named, eligible=TECHNIQUES)))

    @cached_property
    def best(self) -> str:
        """The answer with which planning is cheapest and loses nothing, the simplest of such."""
        return self.best_for(1.0)

    def best_for(self, bound: float) -> str:
        """The same, if it were known that no plan is faster than `bound` times the step as it is."""
        fine = [name for name in SETS if outcome(self, name, bound).regret <= LOSES_NOTHING - 1]
        return min(fine, key=lambda name: outcome(self, name, bound).cost)

    def is_wrong(self, answer: str) -> bool:
        """Whether a plan with this set alone would be none, or a percent slower than with everything."""
        found, all_ = self.times[answer], self.times[ALL]
        return found is None or (all_ is not None and found > LOSES_NOTHING * all_)


@dataclass(frozen=True)
class Outcome:
    """Of planning with an answer: how much slower the plan is than with everything, what finding it cost as a share of
    that, and whether the answer was enough.
    """

    regret: float
    cost: float
    widened: bool


def outcome(case: Case, answer: str | None, bound: float = 1.0) -> Outcome:
    """What the planner makes of an answer, None being that of the rules; as `memscale.policy.widenings` has it.

    `bound` is what no plan is faster than, over the step as it is.
    """
    ours = case.rules
    tried = [(answer or ours, False)]
    if answer is not None:
        both = {*answer.split("+"), *ours.split("+")}
        tried.append(("+".join(name for name in TECHNIQUES if name in both), True))
    tried.append((ALL, True))
    cost, final, seen = 0.0, float("inf"), set[str]()
    for name, enough in tried:
        if name in seen:
            continue
        seen.add(name)
        cost += case.costs[name]
        found = case.times[name]
        final = min(final, found if found is not None else final)
        if found is not None and (enough or found <= NEAR * bound):
            break
    whole = case.times[ALL]
    assert whole is not None, "only cases that can fit are judged"
    return Outcome(final / whole - 1, cost / case.costs[ALL], len(seen) > 1)


def read(labels: Path, proven: Path) -> tuple[list[Case], list[Case]]:
    """All labelled cases that can fit, and those that were proven and can."""
    rows, proofs = known(labels), known(proven)
    steps = {(row["family"], row["seed"], row["card"]): dict(zip(SETS, row["steps"], strict=True)) for row in rows}
    # Trials are counted; how many choices are then simulated was only seen in proofs, and is their mean.
    seen: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for row in proofs:
        counted = steps[row["family"], row["seed"], row["card"]]
        for name, (fits, (simulations, _)) in zip(SETS, row["sets"], strict=True):
            seen[name, fits is not None].append(max(0, simulations - counted[name]))
    choices = {key: sum(found) / len(found) for key, found in seen.items()}
    cases = []
    for row in rows:
        about = row["family"], row["seed"], row["card"]
        for share, features, found in row["cases"]:
            times = {name: None if each is None else each[0] for name, each in zip(SETS, found, strict=True)}
            costs = {name: steps[about][name] + choices.get((name, times[name] is not None), 0.0) for name in SETS}
            cases.append(Case((*about, share), tuple(features), times, costs))
    return can_fit(cases), can_fit(_proven(cases, proofs))


def _proven(cases: list[Case], proofs: list[dict[str, object]]) -> Iterable[Case]:
    labelled = {case.key: case for case in cases}
    for row in proofs:
        times, costs = {}, {}
        for name, (fits, (_, seconds)) in zip(SETS, row["sets"], strict=True):  # type: ignore[call-overload]
            times[name], costs[name] = None if fits is None else fits[0], seconds
        key = row["family"], row["seed"], row["card"], row["budget"]
        yield replace(labelled[key], times=times, costs=costs)  # type: ignore[index]


def can_fit(cases: Iterable[Case]) -> list[Case]:
    """Those that have a plan."""
    return [case for case in cases if case.times[ALL] is not None]
