"""What a plan's step would take with rounding allowed, and in a loop that lets go of its output."""

from __future__ import annotations

from memscale.algebra import Plan
from memscale.core import MemscaleError, format_bytes, format_unlike
from memscale.hardware import Hardware
from memscale.planning.remedies import shorthands, summary
from memscale.planning.search.found import Proven
from memscale.planning.step_simulator import StepSimulator

# Of a step's time or bytes: what rounding would give is told from there on.
_WORTH_TELLING = 0.05
_ALLOWED = "with rounding allowed (exact=False, --allow-rounding)"
_ROUNDS = ": its sums are in another order"


def gain_of_rounding(steps: StepSimulator, hardware: Hardware, found: Proven, limit: int) -> str:
    """What the loss head in pieces would give beside an exact plan; empty where that is little.

    Args:
        steps: of the model; one or two are simulated.
        hardware: where the step runs.
        found: the exact plan, and what its step takes.
        limit: the budget in bytes.
    """
    model = steps.step.module
    head = None if model is None else shorthands(model, hardware).get("tile")
    if head is None or found.plan.of_optimizers():
        return ""
    own = {rule.pattern: rule.transform for rule in found.plan}
    try:
        alone = steps.other(Plan(head), None)
        if alone.taken_bytes <= limit and (alone.step_seconds or 0.0) < (1 - _WORTH_TELLING) * found.seconds:
            gain = f"the step takes {1 - (alone.step_seconds or 0.0) / found.seconds:.0%} less time"
            return f"{_ALLOWED}, {summary(Plan(head))} alone fits, and {gain}{_ROUNDS}"
        both = steps.other(Plan({**own, **head}), None).taken_bytes
    except MemscaleError:  # the head does not run in pieces
        return ""
    if both > (1 - _WORTH_TELLING) * found.taken_bytes:
        return ""
    takes, before = format_unlike(both, found.taken_bytes)
    return f"{_ALLOWED} and {summary(Plan(head))} it takes {takes}, not {before}{_ROUNDS}"


def room_of_loop(steps: StepSimulator, found: Proven) -> str:
    """What the step under a plan takes in a loop that lets go of the output; empty where it does so already."""
    if not steps.step.loop.keeps_output:
        return ""
    inline_bytes = steps.inline(found.plan).taken_bytes
    room_bytes = found.taken_bytes - inline_bytes
    less = f"{format_bytes(inline_bytes)}, {format_bytes(room_bytes)} less" if room_bytes > 0 else "as much"
    return f"; written inline, as loss(model(x)), the step takes {less}"
