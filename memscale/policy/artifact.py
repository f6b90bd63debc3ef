"""`Artifact`: a trained policy as data, small trees of integers in JSON, validated as a whole before use."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from memscale.core import PolicyFallbackNeeded
from memscale.policy.context import FEATURES, TECHNIQUES, StrategyContext

SCHEMA = 1
_MOST_BYTES = 1 << 20
_ARMS = 1 << len(TECHNIQUES)  # the number of sets of techniques; each technique is a bit

# A node: (feature, threshold, next row if value <= threshold, next row otherwise), or a leaf (-1, set, votes, 0).
_Node = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Artifact:
    """Trees that vote for sets of techniques, in integers, so that every platform and every rank decides alike.

    Attributes:
        sha256: the hash of its file.
        trees: tables of nodes; each row refers to later rows only.
        ranges: for each feature the least and the largest value seen in training.
        threshold: the least confidence, in percent, with which its answer counts.
        planner: the fingerprint of the planner that labelled its data; ``""`` accepts any.
    """

    sha256: str
    trees: tuple[tuple[_Node, ...], ...]
    ranges: tuple[tuple[int, ...], ...]
    threshold: int
    planner: str

    @classmethod
    def read(cls, path: str, planner: str = "") -> Artifact:
        """Reads the artifact in a file.

        Raises:
            PolicyFallbackNeeded: ``no_artifact``, ``bad_artifact`` or ``stale_artifact``.
        """
        if not os.path.isfile(path):  # reading a pipe would wait for its other end
            raise PolicyFallbackNeeded("no_artifact")
        try:
            made = cls._checked(Path(path).read_bytes())
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
            raise PolicyFallbackNeeded("bad_artifact") from error
        if made.planner and planner and made.planner != planner:
            raise PolicyFallbackNeeded("stale_artifact")
        return made

    @classmethod
    def _checked(cls, found: bytes) -> Artifact:
        data = json.loads(found)
        trees = tuple(tuple(_integers(node, 4) for node in tree) for tree in data["trees"])
        ranges = tuple(_integers(each, 2) for each in data["ranges"])
        (threshold,), planner = _integers([data["threshold"]], 1), data["manifest"]["planner"]
        is_sound = (
            len(found) <= _MOST_BYTES
            and data["schema"] == SCHEMA
            and (tuple(data["features"]), tuple(data["techniques"])) == (FEATURES, TECHNIQUES)
            and trees
            and all(map(_is_tree, trees))
            and len(ranges) == len(FEATURES)
            and 0 <= threshold <= 100
            and isinstance(planner, str)
        )
        if not is_sound:
            raise ValueError("not a forest of this schema")
        return cls(hashlib.sha256(found).hexdigest(), trees, ranges, threshold, planner)

    def vote(self, context: StrategyContext) -> tuple[tuple[str, ...], int]:
        """Returns the eligible set of techniques with the most votes, and its share of the votes in percent.

        Raises:
            PolicyFallbackNeeded: ``out_of_range:<feature>``, or ``unsure``.
        """
        values = [getattr(context, name) for name in FEATURES]
        for name, value, (low, high) in zip(FEATURES, values, self.ranges, strict=True):
            if not low <= value <= high:
                raise PolicyFallbackNeeded(f"out_of_range:{name}")
        votes = [0] * _ARMS
        for tree in self.trees:
            at = 0
            while tree[at][0] >= 0:
                feature, bound, low_row, high_row = tree[at]
                at = low_row if values[feature] <= bound else high_row
            votes[tree[at][1]] += tree[at][2]
        allowed = sum(1 << TECHNIQUES.index(name) for name in context.eligible)
        arms = [arm for arm in range(_ARMS) if arm & ~allowed == 0]
        best = max(arms, key=lambda arm: (votes[arm], -arm))
        total = sum(votes[arm] for arm in arms)
        confidence = 100 * votes[best] // total if total else 0
        if confidence < self.threshold or not votes[best]:
            raise PolicyFallbackNeeded("unsure")
        return tuple(name for bit, name in enumerate(TECHNIQUES) if best >> bit & 1), confidence


def _is_tree(tree: tuple[_Node, ...]) -> bool:
    """Whether each row is a leaf or refers to later rows, so that every vote ends."""
    return tree != () and all(
        0 <= second < _ARMS and third >= 0
        if feature == -1
        else 0 <= feature < len(FEATURES) and row < min(third, fourth) and max(third, fourth) < len(tree)
        for row, (feature, second, third, fourth) in enumerate(tree)
    )


def _integers(values: Any, count: int) -> tuple[int, ...]:
    if len(values) != count or any(type(value) is not int for value in values):
        raise ValueError(f"not {count} integers")
    return tuple(values)
