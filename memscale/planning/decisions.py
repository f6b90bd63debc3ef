"""What was decided about each part of a model, and what would have been the next best."""

from __future__ import annotations

from memscale.planning.evidence import Decision
from memscale.planning.search import Proven
from memscale.simulation import Phase


def decisions_of(found: Proven) -> tuple[Decision, ...]:
    """A decision for each part, in the order of the step, and one for what is outside of them."""
    costs = found.search.costs
    turn = next(
        (at for at, station in enumerate(costs.stations) if station.phase is Phase.BACKWARD), len(costs.stations) - 1
    )
    held = costs.held_bytes(found.assignment)
    decisions = []
    for row, (menu, effects) in enumerate(zip(costs.candidates, costs.effects, strict=True)):
        number = found.assignment[row]
        now, before = effects[number], effects[0]
        # The fastest of the others, as if it alone were changed.
        others = sorted((each for each in range(len(menu)) if each != number), key=lambda each: effects[each].seconds)
        faster = [each for each in others if effects[each].seconds < now.seconds]
        runner_up = faster[-1] if faster else others[0] if others else None
        other = effects[0 if runner_up is None else runner_up]
        peak = int((held - now.held_bytes + now.slack_bytes + other.held_bytes - other.slack_bytes).max())
        decisions.append(
            Decision(
                path=costs.parts[row].path if row < len(costs.parts) else "",
                chosen=str(menu[number]),
                rule=_rule(menu[number].techniques),
                kept_bytes=int(now.held_bytes[turn]),
                kept_bytes_before=int(before.held_bytes[turn]),
                seconds=now.seconds,
                seconds_before=before.seconds,
                runner_up="" if runner_up is None else str(menu[runner_up]),
                runner_up_seconds=other.seconds,
                # The sum of the costs, put right by what the proof found.
                runner_up_peak_bytes=found.taken_bytes + peak - int(held.max()),
            )
        )
    return tuple(decisions)


def _rule(techniques: frozenset[str]) -> str:
    if not techniques:
        return "what fits is left as it is"
    if "stream" in techniques:
        return "parameters go to the next tier when activations alone do not free enough"
    if "offload" in techniques:
        return "bytes move where the link has time for them"
    if "tile" in techniques:
        return "rows are cut where what is alive at once is too much"
    return "cheapest bytes first: what is recomputed frees most for its time"
