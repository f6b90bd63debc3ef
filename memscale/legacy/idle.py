"""What a training step left out of what `wrap` did, in words for whoever wrote the loop."""

from __future__ import annotations

from collections.abc import Mapping

from memscale.algebra import Plan
from memscale.legacy.watch import Seen


def never_called(kind: str) -> str:
    """Of a model of this class without a batch to plan for, whose optimizer made a step all the same."""
    return (
        f"wrap() saw no call of this {kind}'s forward in a training step, so that nothing was planned; "
        "wrap the module whose forward the loop calls, or pass sample_input=..."
    )


def idle(kind: str, plan: Plan, seen: Mapping[str, Seen]) -> str | None:
    """The patterns of `plan` none of whose regions, by their paths in `seen`, has run; None where each has one."""
    ran = [path for path, region in seen.items() if region.ran]
    # Of experts and of layers that are dropped at random, some rest in any one step.
    resting = [rule.pattern for rule in plan.of_functions() if not any(rule.matches(path) for path in ran)]
    if not seen or not resting:
        return None
    return (
        f"nothing ran of {', '.join(map(repr, resting))} in a training step of this {kind}, so that the plan "
        "saves nothing there: the loop calls other modules, or another forward took the place of theirs (a fused "
        "loss uses lm_head.weight itself); wrap what is called, or turn the fused forward off"
    )
