"""Finds groups: modules around several parts (a stage, a tower, the model) that may be regions in the parts' place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from memscale.planning.parts.blocks import is_called
from memscale.planning.parts.parts import ModuleShares, Part
from memscale.simulation import Trace

# Share of a group's kept bytes: another module around the same parts is a group only if it keeps more by this share;
# more groups take more simulations: benchmarks/bench_plan.py --smallest.
_MORE = 1 / 10
# Share of the step's kept bytes: a module that keeps less is no group, since its candidates are not worth a simulation:
# benchmarks/bench_plan.py --smallest.
_LEAST = 1 / 10


def groups_of(model: nn.Module, step: Trace, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Returns the modules around parts that can be regions themselves, inner modules first.

    Args:
        model: the model.
        step: the trace of the model's step as written.
        parts: the parts of the model, in the order of the step. In the members of the group of the whole model, the
            rest of the model has the number ``len(parts)``.
    """
    if any(not part.path for part in parts):
        return ()
    found = ModuleShares(model, step)
    members: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        above = part.path
        while above:
            above = above.rpartition(".")[0]
            members.setdefault(above, []).append(number)
    chosen: list[str] = []
    for path in sorted(members, key=lambda path: (-len(path.split(".")) if path else 0, members[path])):
        same = [each for each in chosen if members[each] == members[path] and f"{each}.".startswith(path)]
        same += [parts[number].path for number in members[path] if len(members[path]) == 1]
        least = max([_LEAST * found.kept[""], *((1 + _MORE) * found.kept[each] for each in same)])
        if is_called(found.modules[path]) and found.kept[path] >= least:
            chosen.append(path)
    return tuple(
        replace(part, alike=("group", part.alike), members=(*members[part.path], *(() if part.path else (len(parts),))))
        for part in found.parts(chosen)
    )
