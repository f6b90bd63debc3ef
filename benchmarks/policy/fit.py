"""Fits policies to labelled cases, and judges each where neither its family nor its card was seen.

    cd benchmarks/policy; python fit.py labels.jsonl.xz proven.jsonl --artifact policy.json

Prints the tables of docs/policy.md. The artifact is the depth-3 tree of all cases, for ``$MEMSCALE_POLICY``; the same
labels give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import ALL, Case, Outcome, outcome, read
from label import CARDS, SETS
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.tree import DecisionTreeClassifier

from memscale.history import commit_of
from memscale.planning.fingerprint import planner
from memscale.policy import FEATURES, TECHNIQUES

RISK = 0.05
FORCED = ", sure or not"
SHARP = "the best, were the bound the truth"
THRESHOLDS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NEVER_SEEN, CARDS_AT_ONCE = 40, 3
MODELS: dict[str, Callable[[], Any]] = {
    "depth-3 tree": lambda: DecisionTreeClassifier(max_depth=3, min_samples_leaf=10, random_state=0),
    "logistic regression": lambda: make_pipeline(
        FunctionTransformer(np.log1p), StandardScaler(), LogisticRegression(max_iter=2000, C=0.1)
    ),
    "boosted trees": lambda: HistGradientBoostingClassifier(
        max_iter=30, max_depth=3, early_stopping=False, random_state=0
    ),
}
Answers = dict[str, list[str | None]]


def arrays(cases: Sequence[Case]) -> np.ndarray:
    return np.array([case.features for case in cases], dtype=np.float64)


class Fitted:
    """A model of the cheapest answer that loses nothing, and how sure it has to be for its answer to count."""

    def __init__(self, make: Callable[[], Any], cases: Sequence[Case]) -> None:
        labels = np.array([case.best for case in cases])
        groups = [case.configuration for case in cases]
        held: list[tuple[float, bool]] = []
        for fit, left in GroupKFold(3).split(cases, groups=groups):
            model = make().fit(arrays([cases[at] for at in fit]), labels[fit])
            shares = model.predict_proba(arrays([cases[at] for at in left]))
            held += [
                (row.max(), cases[at].is_wrong(str(model.classes_[row.argmax()])))
                for at, row in zip(left, shares, strict=True)
            ]
        self.threshold = 1.01
        for candidate in THRESHOLDS:
            wrong = [bad for sure, bad in held if sure >= candidate]
            if wrong and sum(wrong) / len(wrong) <= RISK:
                self.threshold = candidate
                break
        self.model = make().fit(arrays(cases), labels)

    def answers(self, cases: Sequence[Case]) -> list[tuple[str, bool]]:
        """What it says, and whether it is sure."""
        shares = self.model.predict_proba(arrays(cases))
        return [(str(self.model.classes_[row.argmax()]), bool(row.max() >= self.threshold)) for row in shares]


def judged(cases: Sequence[Case], folds: Iterable[tuple[list[Case], list[Case]]]) -> Answers:
    """What each model says of each case that some fold leaves out."""
    chosen: Answers = {f"{name}{how}": [None] * len(cases) for name in MODELS for how in ("", FORCED)}
    place = {case.key: at for at, case in enumerate(cases)}
    for train, test in folds:
        for name, make in MODELS.items():
            for case, (answer, sure) in zip(test, Fitted(make, train).answers(test), strict=True):
                chosen[name][place[case.key]] = answer if sure else None
                chosen[f"{name}{FORCED}"][place[case.key]] = answer
    return chosen


def left_out(cases: Sequence[Case]) -> Iterable[tuple[list[Case], list[Case]]]:
    """For each family and each three cards: the cases of neither, and those of both."""
    order = random.Random(0).sample(CARDS, len(CARDS))
    for family in sorted({case.key[0] for case in cases}):
        for at in range(0, len(order), CARDS_AT_ONCE):
            cards = order[at : at + CARDS_AT_ONCE]
            test = [case for case in cases if case.key[0] == family and case.key[2] in cards]
            if test:
                yield [case for case in cases if case.key[0] != family and case.key[2] not in cards], test


def bounds(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """95 % of the mean, by resampling configurations."""
    draw = np.random.default_rng(0)
    by_cluster = [values[clusters == name] for name in sorted(set(clusters))]
    if not by_cluster:
        return 0.0, 0.0
    sums, counts = (np.array([each(part) for part in by_cluster]) for each in (np.sum, len))
    drawn = draw.integers(0, len(by_cluster), (2000, len(by_cluster)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def table(cases: Sequence[Case], chosen: Answers) -> str:
    """A row for each policy."""
    clusters = np.array([case.configuration for case in cases])
    rules = [case.rules for case in cases]
    single = min(SETS[:-1], key=lambda name: np.mean([outcome(case, name).cost for case in cases]))
    said: Answers = {
        "always all": [ALL] * len(cases),
        f"always {single} first": [single] * len(cases),
        "rules": [None] * len(cases),
        **chosen,
        "the best, known afterwards": [case.best for case in cases],
    }
    found = {
        name: [outcome(case, answer) for case, answer in zip(cases, each, strict=True)] for name, each in said.items()
    }
    sharp = [case.times[ALL] or 1.0 for case in cases]
    said[SHARP] = [case.best_for(bound) for case, bound in zip(cases, sharp, strict=True)]
    found[SHARP] = [*map(outcome, cases, said[SHARP], sharp)]
    lines = [
        "| policy | answered | wrong by itself, at most | regret mean, 99 %, most | planning time median, 90 % "
        "| widened | regret less the rules' | time less the rules' |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        answers = rules if name == "rules" else said[name]
        at = [row for row, answer in enumerate(answers) if answer is not None]
        wrong = np.array([cases[row].is_wrong(str(answers[row])) for row in at])
        at_most = f"{bounds(wrong, clusters[at])[1]:.0%}" if at else "-"
        regret, cost, widened = columns(each)
        against = [
            bounds(now - then, clusters) for now, then in zip((regret, cost), columns(found["rules"]), strict=False)
        ]
        lines.append(
            f"| {name} | {len(at) / len(cases):.0%} | {at_most} "
            f"| {regret.mean():.2%}, {np.percentile(regret, 99):.2%}, {regret.max():.2%} "
            f"| {np.median(cost):.2f}, {np.percentile(cost, 90):.2f} | {widened.mean():.0%} "
            f"| {against[0][0]:+.2%} to {against[0][1]:+.2%} | {against[1][0]:+.2f} to {against[1][1]:+.2f} |"
        )
    return "\n".join(lines)


def columns(found: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.array([getattr(each, name) for each in found]) for name in ("regret", "cost", "widened"))  # type: ignore[return-value]


def disagreement(cases: Sequence[Case], proven: Sequence[Case]) -> str:
    """How often labels and proofs say otherwise."""
    labelled = {case.key: case for case in cases}
    pairs = [(labelled[case.key], case) for case in proven if case.key in labelled]
    fits = [(a.times[name] is None) != (b.times[name] is None) for a, b in pairs for name in SETS]
    off = [
        abs(a.times[name] / b.times[name] - 1)  # type: ignore[operator]
        for a, b in pairs
        for name in SETS
        if a.times[name] is not None and b.times[name] is not None
    ]
    wrong = [a.is_wrong(name) != b.is_wrong(name) for a, b in pairs for name in SETS[:-1]]
    near = [any(b.times[name] is not None and b.is_wrong(name) is False for name in [a.best]) for a, b in pairs]
    return (
        f"{len(proven)} proven cases that can fit, {len(pairs)} of them by the labels, too; of their {len(fits)} sets "
        f"{np.mean(fits):.0%} fit for one and not for the other, {np.mean(wrong):.0%} lose a percent for one and not "
        f"for the other; times are {np.median(off):.1%} off in the median, {np.percentile(off, 90):.0%} in nine of "
        f"ten; {np.mean(near):.0%} of the labels' answers lose nothing by proof"
    )


def artifact(cases: Sequence[Case], source: bytes, metrics: dict[str, list[float]]) -> bytes:
    """The depth-3 tree of all cases, as `memscale.policy.Artifact` reads it: a tree for each arm, of the same shape."""
    fitted = Fitted(MODELS["depth-3 tree"], cases)
    tree, features = fitted.model.tree_, arrays(cases)
    trees = []
    for arm, name in enumerate(fitted.model.classes_):
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
        "threshold": min(100, round(100 * fitted.threshold)),
        "trees": trees,
        "manifest": {
            "planner": planner(),
            "commit": commit_of("HEAD"),
            "data": hashlib.sha256(source).hexdigest(),
            "cases": len(cases),
            "seed": 0,
            "metrics": metrics,
        },
    }
    return json.dumps(made, sort_keys=True, separators=(",", ":")).encode()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("labels", type=Path)
    options.add_argument("proven", type=Path)
    options.add_argument("--artifact", type=Path)
    given = options.parse_args()
    cases, proven = read(given.labels, given.proven)
    configurations = list(dict.fromkeys(case.configuration for case in cases))
    never = set(configurations[-min(NEVER_SEEN, len(configurations) // 3) :])
    seen = [case for case in cases if case.configuration not in never]
    unseen = [case for case in cases if case.configuration in never]
    cards = {case.key[2] for case in cases}
    print(f"{len(cases)} cases that can fit, of {len(configurations)} configurations on {len(cards)} cards\n")
    print(disagreement(cases, proven), "\n")
    print("; ".join(f"{name} {sum(case.best == name for case in cases)}" for name in SETS), "\n")
    chosen = judged(seen, left_out(seen))
    new = judged(unseen, [(seen, unseen)])
    print("Neither family nor card seen:\n", table(seen, chosen), sep="\n")
    print(f"\n{len(never)} configurations never seen:\n", table(unseen, new), sep="\n")
    known = {case.key: (each, at) for each, part in ((chosen, seen), (new, unseen)) for at, case in enumerate(part)}
    proven = [case for case in proven if case.key in known]
    said: Answers = {name: [known[case.key][0][name][known[case.key][1]] for case in proven] for name in chosen}
    print("\nThe same answers by whole proofs:\n", table(proven, said), sep="\n")
    if given.artifact is not None:
        metrics = {
            name: [
                round(float(part.mean()), 4) for part in columns([outcome(*each) for each in zip(on, who, strict=True)])
            ]
            for name, on, who in (
                ("left out", seen, chosen["depth-3 tree"]),
                ("never seen", unseen, new["depth-3 tree"]),
                ("proven", proven, said["depth-3 tree"]),
            )
        }
        given.artifact.write_bytes(artifact(cases, given.labels.read_bytes(), metrics))


if __name__ == "__main__":
    main()
