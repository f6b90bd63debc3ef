"""Fits policies to labelled cases, and judges each where neither its family nor its card was seen.

    python benchmarks/policy/fit.py benchmarks/policy/labels.jsonl --artifact policy.json

Prints a table for docs/policy.md. The artifact is the depth-3 tree of all cases, for ``$MEMSCALE_POLICY``; the same
labels give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.tree import DecisionTreeClassifier

from memscale.planning.fingerprint import planner
from memscale.policy import FEATURES, TECHNIQUES, StrategyContext, rule

ALL = "+".join(TECHNIQUES)
# The label of a case is the first of these that is within a percent of all of them.
ORDER = ("checkpoint", "tile", "checkpoint+tile", "offload", "checkpoint+offload", "tile+offload", ALL)
LOSES_NOTHING, NEAR = 1.01, 1.02
RISK = 0.05
FORCED = ", sure or not"
THRESHOLDS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MODELS: dict[str, Callable[[], Any]] = {
    "depth-3 tree": lambda: DecisionTreeClassifier(max_depth=3, min_samples_leaf=3, random_state=0),
    "logistic regression": lambda: make_pipeline(
        FunctionTransformer(np.log1p), StandardScaler(), LogisticRegression(max_iter=2000, C=0.1)
    ),
    "boosted trees": lambda: GradientBoostingClassifier(n_estimators=40, max_depth=3, subsample=0.8, random_state=0),
}
Case = dict[str, Any]


def label(case: Case) -> str:
    sets = case["sets"]
    most = sets[ALL]["step_seconds"] * LOSES_NOTHING
    return next(name for name in ORDER if sets[name]["feasible"] and sets[name]["step_seconds"] <= most)


def rules(case: Case) -> str:
    return "+".join(rule(StrategyContext(**case["features"], eligible=TECHNIQUES)))


def outcome(case: Case, chosen: str | None) -> tuple[float, float, bool]:
    """The regret of the final plan, its planning time as a share of always-all's, and whether it was widened.

    `chosen` is None where a model abstains, and the rules decide. A wider set tries again what the one before it tried.
    """
    sets, ours = case["sets"], rules(case)
    tried = [chosen or ours]
    if chosen is not None:
        tried.append("+".join(name for name in TECHNIQUES if name in (*chosen.split("+"), *ours.split("+"))))
    tried.append(ALL)
    seconds, seen, final = 0.0, set(), float("inf")
    for number, name in enumerate(tried):
        if name in seen:
            continue
        seen.add(name)
        seconds += sets[name]["planning_seconds"]
        found = sets[name]["step_seconds"]
        if found is not None:
            final = min(final, found)
            if found <= NEAR * case["plain_seconds"] or (chosen is not None and number == 1):
                break
    whole = sets[ALL]
    return final / whole["step_seconds"] - 1, seconds / whole["planning_seconds"], name != tried[0]


def arrays(cases: list[Case]) -> np.ndarray:
    return np.array([[case["features"][name] for name in FEATURES] for case in cases], dtype=np.float64)


def answers(make: Callable[[], Any], train: list[Case], test: list[Case]) -> list[tuple[str, bool]]:
    """What a model chooses for cases, and whether it is sure; the training set says how sure it has to be."""
    labels = np.array([label(case) for case in train])
    if len(set(labels)) < 2:
        return [(str(labels[0]), True)] * len(test)
    groups = [f"{case['family']} {case['seed']}" for case in train]
    held: list[tuple[float, bool]] = []
    for fit, left in GroupKFold(3).split(train, groups=groups):
        if len(set(labels[fit])) < 2:
            continue
        model = make().fit(arrays([train[at] for at in fit]), labels[fit])
        shares = model.predict_proba(arrays([train[at] for at in left]))
        for at, row in zip(left, shares, strict=True):
            sets = train[at]["sets"]
            picked = sets[model.classes_[row.argmax()]]["step_seconds"]
            held.append((row.max(), picked is None or picked > LOSES_NOTHING * sets[ALL]["step_seconds"]))
    threshold = 1.01
    for candidate in THRESHOLDS:
        wrong = [bad for sure, bad in held if sure >= candidate]
        if wrong and sum(wrong) / len(wrong) <= RISK:
            threshold = candidate
            break
    model = make().fit(arrays(train), labels)
    shares = model.predict_proba(arrays(test))
    return [(str(model.classes_[row.argmax()]), row.max() >= threshold) for row in shares]


def judged(cases: list[Case]) -> dict[str, list[str | None]]:
    """What each policy chooses for each case, by models that saw neither its family nor its card."""
    names = [f"{name}{how}" for name in MODELS for how in ("", FORCED)]
    chosen: dict[str, list[str | None]] = {name: [None] * len(cases) for name in names}
    for family, card in sorted({(case["family"], case["card"]) for case in cases}):
        train = [case for case in cases if case["family"] != family and case["card"] != card]
        at = [row for row, case in enumerate(cases) if (case["family"], case["card"]) == (family, card)]
        for name, make in MODELS.items():
            for row, (answer, sure) in zip(at, answers(make, train, [cases[row] for row in at]), strict=True):
                chosen[name][row] = answer if sure else None
                chosen[f"{name}{FORCED}"][row] = answer
    return chosen


def interval(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """95 % of the mean, by resampling configurations."""
    draw = np.random.default_rng(0)
    by_cluster = [values[clusters == name] for name in sorted(set(clusters))]
    means = [
        np.concatenate([by_cluster[at] for at in draw.integers(0, len(by_cluster), len(by_cluster))]).mean()
        for _ in range(2000)
    ]
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def table(cases: list[Case]) -> str:
    clusters = np.array([f"{case['family']} {case['seed']}" for case in cases])
    chosen = judged(cases)
    single = min(ORDER[:-1], key=lambda name: np.mean([outcome(case, name)[1] for case in cases]))
    policies: dict[str, list[tuple[float, float, bool]]] = {
        "always all": [(0.0, 1.0, False)] * len(cases),
        f"always {single}, then the rules' too": [outcome(case, single) for case in cases],
        "rules": [outcome(case, None) for case in cases],
        **{
            name: [outcome(case, answer) for case, answer in zip(cases, each, strict=True)]
            for name, each in chosen.items()
        },
        "the best, known afterwards": [outcome(case, label(case)) for case in cases],
    }
    base = {kind: np.array([each[kind] for each in policies["rules"]]) for kind in (0, 1)}
    lines = [
        "| policy | answered | regret mean, 99 %, most | planning time median, 90 % | widened "
        "| regret less the rules' | time less the rules' |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in policies.items():
        regret, time = (np.array([each[kind] for each in found]) for kind in (0, 1))
        answered = np.mean([each is not None for each in chosen[name]]) if name in chosen else 1.0
        widened = np.mean([each[2] for each in found])
        against = [interval(now - base[kind], clusters) for kind, now in ((0, regret), (1, time))]
        lines.append(
            f"| {name} | {answered:.0%} | {regret.mean():.2%}, {np.percentile(regret, 99):.2%}, {regret.max():.2%} "
            f"| {np.median(time):.2f}, {np.percentile(time, 90):.2f} | {widened:.0%} "
            f"| {against[0][0]:+.2%} to {against[0][1]:+.2%} | {against[1][0]:+.2f} to {against[1][1]:+.2f} |"
        )
    return "\n".join(lines)


def artifact(cases: list[Case], source: bytes) -> bytes:
    """The depth-3 tree of all cases, as `memscale.policy.Artifact` reads it: a tree for each arm, of the same shape."""
    labels = np.array([label(case) for case in cases])
    features = arrays(cases)
    model = MODELS["depth-3 tree"]().fit(features, labels)
    tree = model.tree_
    trees = []
    for arm, name in enumerate(model.classes_):
        bits = sum(1 << TECHNIQUES.index(each) for each in name.split("+"))
        nodes = []
        for row in range(tree.node_count):
            if tree.children_left[row] < 0:
                nodes.append([-1, bits, round(1000 * float(tree.value[row, 0, arm])), 0])
            else:
                below = [int(tree.children_left[row]), int(tree.children_right[row])]
                nodes.append([int(tree.feature[row]), int(np.floor(tree.threshold[row])), *below])
        trees.append(nodes)
    made = {
        "schema": 1,
        "features": list(FEATURES),
        "techniques": list(TECHNIQUES),
        "ranges": [[int(column.min()), int(column.max())] for column in features.T],
        "threshold": 70,
        "trees": trees,
        "manifest": {
            "planner": planner(),
            "data": hashlib.sha256(source).hexdigest(),
            "cases": len(cases),
            "seed": 0,
        },
    }
    return json.dumps(made, sort_keys=True, separators=(",", ":")).encode()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("labels", type=Path)
    options.add_argument("--artifact", type=Path)
    given = options.parse_args()
    source = given.labels.read_bytes()
    rows = [json.loads(line) for line in source.splitlines()]
    cases = [case for case in rows if case["sets"][ALL]["feasible"]]
    names = {(case["family"], case["seed"]) for case in rows}
    cards = {case["card"] for case in rows}
    print(
        f"{len(rows)} cases, {len(rows) * len(ORDER)} labels, of {len(names)} configurations of "
        f"{len({family for family, _ in names})} families on {len(cards)} cards; {len(cases)} of them can fit\n"
    )
    counts = {name: sum(label(case) == name for case in cases) for name in ORDER}
    print("; ".join(f"{name} {count}" for name, count in counts.items()), "\n")
    print(table(cases))
    if given.artifact is not None:
        given.artifact.write_bytes(artifact(cases, source))


if __name__ == "__main__":
    main()
