"""Makes the evidence of a search: a `Decision` with its runner-up for each part, and the rules that decided."""

from __future__ import annotations

from memscale.algebra import Plan
from memscale.core import format_bytes, format_seconds, format_unlike
from memscale.planning.evidence.evidence import Decision
from memscale.planning.search.found import Found
from memscale.planning.solving.solver import LinkRates
from memscale.simulation import Profile


def decisions_of(best: Found) -> tuple[Decision, ...]:
    """Returns a decision for each part, in the order of the step, and one for the rest of the model if there is any."""
    found = best.proven
    costs = found.costs
    turn, held = costs.turn, costs.held_bytes(found.assignment)
    covered = costs.covered(found.assignment)
    decisions = []
    is_whole = bool(costs.parts) and not costs.parts[0].path
    groups = costs.groups
    for row in sorted(range(len(costs.effects)), key=lambda row: groups.get(row, (row,))):
        menu, effects = costs.candidates[row], costs.effects[row]
        number, members = found.assignment[row], groups.get(row, ())
        if row in covered or (members and not number) or (is_whole and row == len(costs.parts)):
            continue
        now, before = effects[number], effects[0]
        # The effect of a group's candidate is an addition to the unchanged members: bytes and seconds of the members
        # come on top.
        inside = [costs.effects[member][0] for member in members]
        kept = sum(int(each.held_bytes[turn]) for each in inside)
        seconds = sum(each.seconds for each in inside)
        # The runner-up: of the faster candidates the slowest; if none is faster, the fastest of all others.
        others = [at for at in range(len(menu)) if at != number]
        others.sort(key=lambda each: effects[each].seconds)
        faster = [each for each in others if effects[each].seconds < now.seconds]
        runner_up = faster[-1] if faster else others[0] if others else None
        other = effects[0 if runner_up is None else runner_up]
        peak = int((held - now.held_bytes + now.slack_bytes + other.held_bytes - other.slack_bytes).max())
        decisions.append(
            Decision(
                path=costs.parts[row].path if row < len(costs.parts) else "",
                chosen=str(menu[number]),
                rule=_rule(menu[number].techniques),
                kept_bytes=kept + int(now.held_bytes[turn]),
                kept_bytes_before=kept + int(before.held_bytes[turn]),
                seconds=seconds + now.seconds,
                seconds_before=seconds + before.seconds,
                runner_up="" if runner_up is None else str(menu[runner_up]),
                runner_up_seconds=seconds + other.seconds,
                # The change of the sum of costs, added to the bytes of the simulated step.
                runner_up_peak_bytes=found.taken_bytes + peak - int(held.max()),
            )
        )
    return tuple(decisions)


def rejected_of(best: Found) -> dict[str, str]:
    """Returns the candidates that are impossible, each with the reason."""
    return {str(each): reason for each, reason in best.proven.costs.rejected.items()}


def _rule(techniques: frozenset[str]) -> str:
    if not techniques:
        return "unchanged, since the plan fits with the other parts alone"
    if "stream" in techniques:
        return "parameters are streamed, since activations alone do not free enough"
    if "offload" in techniques:
        return "activations are offloaded where the link has time for the copies"
    if "tile" in techniques:
        return "rows are tiled where the tensors of one part take too much at once"
    return "checkpoints where a second of recompute frees the most bytes"


def trace_of(best: Found, limit: int, plain: Profile, link: LinkRates | None) -> tuple[str, ...]:
    """Returns the rules that decided, in order, as lines of text with their numbers.

    Args:
        best: the result of the search.
        limit: bytes that the step may take.
        plain: the profile of the step as written.
        link: the rates of the link that all copies share; None without a tier to copy to.
    """
    found = best.proven
    costs = found.costs
    taken, written_bytes = found.taken_bytes, plain.taken_bytes
    candidates = [each for menu in costs.candidates for each in menu]
    techniques = {name for each in candidates for name in each.techniques}
    groups = f", {len(costs.groups)} group{'s' * (len(costs.groups) > 1)} of parts" if costs.groups else ""
    takes, budget = format_unlike(written_bytes, limit)
    trace = [
        f"memory pressure: the step as written takes {takes}, {written_bytes / limit:.2f} × the budget of {budget}"
        + ("" if plain.step_seconds is None else f", and {format_seconds(plain.step_seconds)}"),
        f"eligible: {', '.join(sorted(techniques)).replace('stream', 'offloaded weights')}",
        f"candidates: {len(candidates)} for {len(costs.paths)} parts{groups} and the rest of the model",
    ]
    if link is not None:
        written = [menu[0] for menu in costs.effects]
        out = format_bytes(link.out_bytes_per_second * sum(each.forward_seconds for each in written))
        back = format_bytes(link.in_bytes_per_second * sum(each.backward_seconds for each in written))
        trace.append(f"link: {out} can be copied out during forward, {back} back during backward")
    if stepping := Plan(found.always).of_optimizers():
        trace.append(f"the optimizer: {', '.join(repr(rule.transform) for rule in stepping)}")
    trace.append(f"estimate: the fastest choice of candidates takes at least {format_seconds(best.bound_seconds)}")
    trace.append(
        f"proof: the simulated step takes {format_bytes(taken)}, {taken / limit:.1%} of the budget, in "
        f"{format_seconds(found.seconds)}, {found.seconds / (plain.step_seconds or found.seconds):.2f} × the step as "
        "written"
    )
    return tuple(trace)
