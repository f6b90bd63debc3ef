"""Groups: modules around several parts, a stage, a tower, the model, which compete with what is inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from memscale.planning.parts.parts import Part, Uses
from memscale.simulation import Trace

# Of what a group keeps: a module around the same parts is a group beside it only if its own code keeps so much more.
_MORE = 1 / 10
# Of what the step keeps: what is around less is no group, for no decision about it as a whole is worth a simulation.
_LEAST = 1 / 10


def groups_of(model: nn.Module, step: Trace, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The modules around parts that can be regions themselves, those inside others first.

    Args:
        model: that the parts are of.
        step: its step as it is.
        parts: in the order of the step; what is outside of them is the number behind the last.
    """
    if any(not part.path for part in parts):
        return ()
    uses = Uses(model, step)
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
        least = max([_LEAST * uses.kept[""], *((1 + _MORE) * uses.kept[each] for each in same)])
        if _is_called(uses.modules[path]) and uses.kept[path] >= least:
            chosen.append(path)
    return tuple(
        replace(part, alike=("group", part.alike), members=(*members[part.path], *(() if part.path else (len(parts),))))
        for part in uses.parts(chosen)
    )


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward, and one that Python runs."""
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward
