"""Notes about what an exact plan leaves: the gain of transforms that round, and of a loop that frees the output."""

from __future__ import annotations

from memscale.algebra import Plan
from memscale.core import MemscaleError, format_bytes, format_unlike
from memscale.hardware import Hardware
from memscale.planning.remedies import shorthands, summary
from memscale.planning.search.found import Proven
from memscale.planning.step_simulator import StepSimulator

# Share of a step's time or bytes from which the gain of rounding is worth a note.
_WORTH_TELLING = 0.05
_ALLOWED = "with rounding allowed (exact=False, --allow-rounding)"
_ROUNDS = ": its sums are in another order"


def gain_of_rounding(steps: StepSimulator, hardware: Hardware, found: Proven, limit: int) -> str:
    """Returns the note about the gain of a tiled loss head over an exact plan; "" if the gain is small.

    Args:
        steps: the simulator of the step; one or two steps are simulated.
        hardware: the device of the step.
        found: the exact plan, with the figures of its step.
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
    except MemscaleError:  # the tiled head fails
        return ""
    if both > (1 - _WORTH_TELLING) * found.taken_bytes:
        return ""
    takes, before = format_unlike(both, found.taken_bytes)
    return f"{_ALLOWED} and {summary(Plan(head))} it takes {takes}, not {before}{_ROUNDS}"


def room_of_loop(steps: StepSimulator, found: Proven) -> str:
    """Returns the note about the bytes of the planned step in a loop that frees the output; "" if the loop does so."""
    if not steps.step.loop.keeps_output:
        return ""
    inline_bytes = steps.inline(found.plan).taken_bytes
    room_bytes = found.taken_bytes - inline_bytes
    less = f"{format_bytes(inline_bytes)}, {format_bytes(room_bytes)} less" if room_bytes > 0 else "as much"
    return f"; written inline, as loss(model(x)), the step takes {less}"
