"""Choices with the same for all blocks, as one would write by hand."""

from __future__ import annotations

from collections import Counter

from memscale.core import template
from memscale.planning.trials.costs import Assignment, Costs


def moving_alike(costs: Costs, among: frozenset[str]) -> list[Assignment]:
    """Choices with one candidate that moves activations, of these techniques, for all blocks that have it.

    What many do to the link and to an allocator is least like what one does that is tried beside others: a plan for an
    EfficientNet took 1.36 of the time of one that offloads and checkpoints each block.
    """
    rows = Counter(map(template, costs.paths))
    blocks = [row for row, path in enumerate(costs.paths) if rows[template(path)] > 1]
    kinds = dict.fromkeys(
        each
        for row in blocks
        for each in costs.candidates[row]
        if "offload" in each.techniques <= among - {"stream"} and [path for path, _ in each.rules] == [""]
    )
    return [
        tuple(menu.index(kind) if row in blocks and kind in menu else 0 for row, menu in enumerate(costs.candidates))
        for kind in kinds
    ]
