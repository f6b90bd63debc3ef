"""Shortens a model by most blocks of a long row, for trials that these blocks do not affect."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from memscale.algebra import Plan, transform
from memscale.planning.parts.parts import Part
from memscale.telemetry import uncounted

# Blocks that stay at each end of a row; the simulated step says by how much fewer would be wrong:
# benchmarks/bench_simulate.py --plan.
_STAY = 2
# The fewest blocks to leave out: the check of a short stack takes a simulation, which fewer blocks do not make up for:
# benchmarks/bench_simulate.py --plan.
_FEWEST = 16


def left_out(parts: Sequence[Part], families: Mapping[object, Sequence[int]]) -> frozenset[str]:
    """Returns the paths of the parts with alike parts on both sides; empty if such parts are few.

    Args:
        parts: the parts of a model.
        families: the numbers of alike parts, by family.
    """
    rows = (rows[_STAY:-_STAY] for rows in families.values())
    found = frozenset(parts[row].path for inside in rows for row in inside)
    return found if len(found) >= _FEWEST else frozenset()


def shortened(model: nn.Module, paths: Collection[str]) -> nn.Module:
    """Returns `model` without the modules at `paths`; the other modules keep their paths and share their parameters.

    >>> short = shortened(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), ["1", "2"])
    >>> [path for path, _ in short.named_children()]
    ['0', '3']
    """
    short = uncounted(transform)(model, Plan())
    assert isinstance(short, nn.Module)
    for path in paths:
        parent, _, name = path.rpartition(".")
        del short.get_submodule(parent)._modules[name]
    return short
