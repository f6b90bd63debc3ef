"""A model with most of a long row of blocks left out, for trials that ask nothing of these blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from memscale.algebra import Plan, transform
from memscale.planning.parts.parts import Part
from memscale.telemetry import uncounted

# Of a row of blocks, at both of its ends.
_STAY = 2
# Finding out whether a short stack tells of the whole takes a simulation, which fewer blocks do not make up for.
_FEWEST = 16


def left_out(parts: Sequence[Part], families: Mapping[object, Sequence[int]]) -> frozenset[str]:
    """The paths of the parts that have parts like them on both sides; none where they are few.

    Args:
        parts: of a model.
        families: the numbers of the parts that are alike.
    """
    rows = (rows[_STAY:-_STAY] for rows in families.values())
    found = frozenset(parts[row].path for inside in rows for row in inside)
    return found if len(found) >= _FEWEST else frozenset()


def shortened(model: nn.Module, paths: Collection[str]) -> nn.Module:
    """`model` without the modules at `paths`; it shares its parameters, and the others have the paths that they had.

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
