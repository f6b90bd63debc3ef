"""The costs of candidates for groups, as additions to a step in which the members of the group are unchanged.

A group is tried as a part of its own, in a coarser division of the model; disjoint groups are tried in the same steps.
The bytes that a group holds in its own turn count in the turn of each member.

"Fine" intervals are those of `costs`, "coarse" intervals those of the division with groups as parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from memscale.planning.parts.candidates import AS_IT_IS, Candidate
from memscale.planning.parts.parts import Part
from memscale.planning.trials.costs import Assignment, Bytes, Costs, Effect, measured_costs
from memscale.planning.trials.trial_rows import MOVES
from memscale.planning.trials.trials import Simulate, Trials
from memscale.simulation import OUTSIDE, Interval, Phase, Trace, attribute

# A group is tried if it keeps at least this share of the peak while each member has the candidate that keeps least:
# benchmarks/bench_plan.py --smallest.
_MATTERS = 1 / 10


def with_groups(
    costs: Costs,
    plain: Trace,
    groups: Sequence[Part],
    menu_of: Callable[[Part], tuple[Candidate, ...]],
    simulate: Simulate,
    trials: Trials,
    *,
    most: int,
) -> Costs:
    """Returns `costs` with the groups that can lower the peak and their candidates.

    Args:
        costs: the costs of the parts.
        plain: the trace of the step as written, with its update.
        groups: the groups, inner groups before the groups around them.
        menu_of: returns the candidates for a group.
        simulate, trials, most: as in `measured_costs`.
    """
    groups = [group for group in groups if _matters(costs, plain, group)]
    found: list[tuple[Part, tuple[Candidate, ...], tuple[Effect, ...]]] = []
    rejected = dict(costs.rejected)
    while groups:
        level: list[Part] = []
        for group in groups:
            if all(set(group.members).isdisjoint(each.members) for each in level):
                level.append(group)
        groups = [group for group in groups if group not in level]
        covered = {each for group in level for each in group.members}
        rows = [(row, part) for row, part in enumerate(costs.parts) if row not in covered]
        rows += [(group.members[0], group) for group in level]
        parts = tuple(part for _, part in sorted(rows, key=lambda each: each[0]))
        menus = [menu_of(part) if part.members else (AS_IT_IS,) for part in parts]
        coarse = measured_costs(plain, parts, [*menus, (AS_IT_IS,)], simulate, trials, most=most, loop_share=1.0)
        rejected |= coarse.rejected
        for row, part in enumerate(parts):
            if part.members and len(coarse.candidates[row]) > 1:
                found.append((part, coarse.candidates[row], _added(costs, coarse, row)))
    found.sort(key=lambda each: each[0].members)
    outside = len(costs.parts)
    # The rest of the model stays the last row: its number grows by the number of new groups.
    moved = {outside: outside + len(found)}
    return replace(
        costs,
        parts=(
            *costs.parts,
            *(replace(part, members=tuple(moved.get(at, at) for at in part.members)) for part, *_ in found),
        ),
        candidates=(*costs.candidates[:-1], *(menu for _, menu, _ in found), costs.candidates[-1]),
        effects=(*costs.effects[:-1], *(effects for *_, effects in found), costs.effects[-1]),
        rejected=rejected,
    )


def _matters(costs: Costs, plain: Trace, group: Part) -> bool:
    """Returns whether a group may lower the peak further than its members do, by at least the share `_MATTERS`."""
    least = tuple(_least(costs, row) for row in range(len(costs.effects)))
    held = costs.held_bytes(least)
    updates = [interval.phase is Phase.OPTIMIZER for interval in costs.intervals]
    most_bytes = int(held.max())
    left_bytes = int(attribute(plain, [group.path]).kept_bytes[0])
    for row in group.members:
        as_it_is, now = costs.effects[row][0], costs.effects[row][least[row]]
        left_bytes -= int(as_it_is.held_bytes[costs.turn] - now.held_bytes[costs.turn])
    # No group lowers the bytes that the update holds.
    return min(left_bytes, most_bytes - int(held[updates].max(initial=0))) >= _MATTERS * most_bytes


def _least(costs: Costs, row: int) -> int:
    """Returns the candidate that keeps the fewest bytes for backward, among the candidates without moves."""
    still = [at for at, each in enumerate(costs.candidates[row]) if not each.techniques & MOVES]
    return min(still, key=lambda at: int(costs.effects[row][at].held_bytes[costs.turn]))


def _added(costs: Costs, coarse: Costs, row: int) -> tuple[Effect, ...]:
    """Returns the effects of the candidates of the group in `row` of `coarse`, as additions at fine intervals."""
    none = np.zeros(len(costs.intervals), dtype=np.int64)
    found = [Effect(none, none, 0.0, 0.0)]
    as_it_is = coarse.effects[row][0]
    for number, effect in enumerate(coarse.effects[row][1:], 1):
        assignment = tuple(number if at == row else 0 for at in range(len(coarse.effects)))
        found.append(
            Effect(
                _added_bytes(costs, coarse, row, coarse.held_bytes(assignment)),
                none,
                effect.forward_seconds - as_it_is.forward_seconds,
                effect.backward_seconds - as_it_is.backward_seconds,
            )
        )
    return tuple(found)


def _added_bytes(costs: Costs, coarse: Costs, row: int, now: Bytes) -> Bytes:
    """Returns [fine interval] the bytes that `now` [coarse interval] holds more than the step as written."""
    owner = {part.path: number for number, part in enumerate(coarse.parts)}
    for number, part in enumerate(coarse.parts):
        owner |= {costs.parts[member].path: number for member in part.members if member < len(costs.parts)}
    columns = {interval: at for at, interval in enumerate(coarse.intervals)}
    fine, before = costs.held_bytes(costs.as_it_is), coarse.held_bytes(coarse.as_it_is)
    added = np.zeros(len(fine), dtype=np.int64)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        turn = columns.get(Interval(phase, row, False))
        if turn is None:
            continue
        # After its last member a group may still run or be done: the larger bytes of the two cases count.
        columns_at: dict[int, list[int]] = {}
        for at, interval in enumerate(costs.intervals):
            if interval.phase is phase:
                number = OUTSIDE if interval.part == OUTSIDE else owner[costs.parts[interval.part].path]
                same = columns.get(Interval(phase, number, interval.outside), turn)
                columns_at[at] = [same, turn] if number == row else [same]
        most = max(int(fine[at]) for at, sources in columns_at.items() if turn in sources)
        for at, sources in columns_at.items():
            added[at] = max(int(now[each]) - (most if each == turn else int(before[each])) for each in sources)
    return added


def shown_bytes(costs: Costs, assignment: Assignment, held: Mapping[Interval, int]) -> Bytes:
    """Returns [interval] the bytes that a simulated step with an assignment held.

    Intervals that the step did not reach have the estimated bytes. In the turns of a chosen group's members the
    estimate is shifted by one amount: the simulated peak in these turns less the estimated peak.

    Args:
        costs: the costs, with the intervals.
        assignment: the choice that was simulated.
        held: the bytes by interval of the simulated step.
    """
    thought = costs.held_bytes(assignment)
    found = np.array(
        [held.get(interval, each) for interval, each in zip(costs.intervals, thought.tolist(), strict=True)]
    )
    for row, members in costs.groups.items():
        for phase in (Phase.FORWARD, Phase.BACKWARD) if assignment[row] else ():
            of = {*members, *([OUTSIDE] if len(costs.effects) - 1 in members else [])}
            turn = [at for at, each in enumerate(costs.intervals) if each.phase is phase and each.part in of]
            if turn:
                shown = max(nbytes for each, nbytes in held.items() if each.phase is phase and each.part in of)
                found[turn] = thought[turn] + shown - thought[turn].max()
    return found
