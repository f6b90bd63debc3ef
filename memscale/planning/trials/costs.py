"""What each candidate of each part costs and frees, from a few simulated steps in which many are tried.

Parts that are alike share what is found: in a row of eighty blocks, twelve of them try twelve candidates in one
simulated step, and what one of them held before, during and after its own turn is what any other would.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memscale.hardware import Hardware, host_seconds
from memscale.planning.parts.candidates import AS_IT_IS, Candidate, Rules
from memscale.planning.parts.parts import Part
from memscale.planning.trials.trial_rows import MOVES
from memscale.planning.trials.trials import Simulate, Trials, TrialSteps
from memscale.simulation import OUTSIDE, Attribution, Interval, Phase, Trace, attribute

Bytes = npt.NDArray[np.int64]
# How often an optimizer on the host goes over its states in a step: Adam's loop over single tensors, by simulation.
_STATE_PASSES = 8

#: What is done to a group is made of, beside its techniques.
GROUPED = frozenset({"group"})

#: A candidate for each part, by number; the last is that of what is outside.
Assignment = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Effect:
    """What a candidate does to the step.

    Attributes:
        held_bytes: [interval] the most that the part holds there.
        slack_bytes: [interval] what the sum over the parts is above what is held at once, at the part's own intervals.
        forward_seconds, backward_seconds: of its operators.
        out_bytes: what moves to another tier, from its forward on, until its backward.
        waits_seconds: how long the device stands still for what it moves.
        update_seconds: of the optimizer on the host, for parameters that live there, less what it saves the device.
    """

    held_bytes: Bytes
    slack_bytes: Bytes
    forward_seconds: float
    backward_seconds: float
    out_bytes: int = 0
    waits_seconds: float = 0.0
    update_seconds: float = 0.0

    @property
    def moving_seconds(self) -> float:
        """What it takes beside its operators, since it moves something."""
        return self.waits_seconds + self.update_seconds

    @property
    def seconds(self) -> float:
        """What it adds to the step."""
        return self.forward_seconds + self.backward_seconds + self.moving_seconds


@dataclass(frozen=True, eq=False)
class Costs:
    """The effects of all candidates of all parts, and what holds whatever is chosen.

    Attributes:
        intervals: of the step.
        parts: what is decided about, in the order of the step, and behind these the groups: parts around some of them,
            of which each candidate but `AS_IT_IS` asks that those are as they are, and tells what it adds to that.
        candidates: of each part, and last of what is outside.
        effects: in the same order.
        fixed_seconds: the time of the optimizer.
        rejected: candidates that cannot be, with the reason.
        together_bytes: [interval] what the update makes for a moment because it is one of all parameters at once, which
            it is not once some of them live on another tier; None is nothing.
    """

    intervals: tuple[Interval, ...]
    parts: tuple[Part, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    effects: tuple[tuple[Effect, ...], ...]
    fixed_seconds: float
    rejected: Mapping[Candidate, str]
    together_bytes: Bytes | None = None

    @property
    def paths(self) -> list[str]:
        """Of the parts that are no groups."""
        return [part.path for part in self.parts if not part.members]

    @functools.cached_property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """The numbers of the groups, each with those of what is inside."""
        return {row: part.members for row, part in enumerate(self.parts) if part.members}

    def covered(self, assignment: Assignment) -> frozenset[int]:
        """The numbers of what is inside of groups for which an assignment chooses something."""
        return frozenset(each for row, members in self.groups.items() if assignment[row] for each in members)

    def techniques(self, row: int, number: int) -> frozenset[str]:
        """What a candidate is made of, with `GROUPED` if it is a group's."""
        return self.candidates[row][number].techniques | (GROUPED if number and row in self.groups else frozenset())

    @property
    def turn(self) -> int:
        """The interval where backward begins."""
        return _turn(self.intervals)

    @property
    def as_it_is(self) -> Assignment:
        """The assignment that changes nothing."""
        return (0,) * len(self.candidates)

    def rules(self, assignment: Assignment) -> Rules:
        """The rules of an assignment, in the order of the step."""
        paths = [*(part.path for part in self.parts), ""]
        chosen = (menu[number] for menu, number in zip(self.candidates, assignment, strict=True))
        return tuple(itertools.chain.from_iterable(each.at(path) for each, path in zip(chosen, paths, strict=True)))

    def held_bytes(self, assignment: Assignment) -> Bytes:
        """[interval] what the step holds at most under an assignment."""
        chosen = [menu[number] for menu, number in zip(self.effects, assignment, strict=True)]
        held: Bytes = np.sum([each.held_bytes - each.slack_bytes for each in chosen], axis=0)
        return held - self.together_bytes if self.together_bytes is not None and self.streams(assignment) else held

    def streams(self, assignment: Assignment) -> bool:
        """Whether some parameters live on another tier under an assignment."""
        chosen = (menu[number] for menu, number in zip(self.candidates, assignment, strict=True))
        return any("stream" in each.techniques for each in chosen)

    def seconds(self, assignment: Assignment) -> float:
        """The time of the step under an assignment."""
        return self.fixed_seconds + sum(
            menu[number].seconds for menu, number in zip(self.effects, assignment, strict=True)
        )


def measured_costs(
    plain: Trace,
    parts: tuple[Part, ...],
    menus: Sequence[tuple[Candidate, ...]],
    simulate: Simulate,
    trials: Trials,
    *,
    most: int,
    loop_share: float,
) -> Costs:
    """The costs of the candidates in `menus`, one menu for each part and one for what is outside.

    Args:
        plain: the step as it is, with its update.
        parts: of the model.
        menus: their candidates, `AS_IT_IS` first; parts that are alike have the same.
        simulate: a step with rules, of the model without some parts.
        trials: of candidates that were tried before; those that are tried here are added.
        most: the simulations that may be made for it; candidates that are left then are not tried.
        loop_share: of what the update makes for a moment, what it makes where some parameters live on another tier.
    """
    paths = [part.path for part in parts]
    base = attribute(plain, paths)
    rejected = TrialSteps(base, parts, menus, simulate).run(trials, most)
    found: list[tuple[Candidate, ...]] = []
    effects: list[tuple[Effect, ...]] = []
    for row, menu in enumerate(menus):
        part = parts[row] if row < len(parts) else None
        known: dict[Candidate, Effect] = {AS_IT_IS: _effect(base, base, row, row)}
        for candidate in menu[1:]:
            trial = trials.get((None if part is None else part.alike, candidate))
            if trial is not None:
                moves = bool(candidate.techniques & MOVES)
                effect = _effect(base, trial.found, row, trial.row, trial.tried, moves=moves)
                known[candidate] = effect if "tile" in candidate.techniques else _no_faster(effect, known[AS_IT_IS])
        known = {
            candidate: _with_moves(candidate, effect, known, base, row, plain.hardware)
            for candidate, effect in known.items()
        }
        found.append(tuple(known))
        effects.append(tuple(known.values()))
    _, __, update_seconds = base.seconds.sum(axis=0).tolist()
    return Costs(
        base.intervals,
        parts,
        tuple(found),
        tuple(effects),
        update_seconds,
        rejected,
        _moment_bytes(base) - (loop_share * _moment_bytes(base)).astype(np.int64),
    )


def _moment_bytes(base: Attribution) -> Bytes:
    """[interval] what is held for a moment while the optimizer steps."""
    outside = base.held_bytes[-1]
    steps = np.array([interval.phase is Phase.OPTIMIZER for interval in base.intervals])
    found: Bytes = np.where(steps, np.maximum(0, outside - outside[0]), 0)
    return found


def _effect(
    base: Attribution,
    found: Attribution,
    row: int,
    source: int,
    tried: frozenset[int] = frozenset(),
    *,
    moves: bool = False,
) -> Effect:
    """What the part in `row` does if it is given what `source` was given in `found`; `moves` if that moves anything."""
    held = np.zeros(len(base.intervals), dtype=np.int64)
    slack = np.zeros(len(base.intervals), dtype=np.int64)
    number, source_number = (OUTSIDE if each == len(base.held_bytes) - 1 else each for each in (row, source))
    mine = found.held_bytes[source] + _owed(base, found, source, tried)
    matches = _matches(base.intervals, found.intervals, number, source_number, mine)
    beside = _beside(base, row, source, number, source_number)
    if moves:  # what a source moves need not be there
        beside = np.maximum(0, beside)
    # Small parameters of a streamed part stay where they are, and only they have states and updates on the device.
    parameters_bytes = int(base.parameters_bytes[row])
    stays = min(1.0, found.parameters_bytes[source] / parameters_bytes) if parameters_bytes else 1.0
    for at, (interval, match) in enumerate(zip(base.intervals, matches, strict=True)):
        if interval.phase is Phase.OPTIMIZER:
            # Trials do not update; what lives on another tier is updated there.
            held[at] = int(stays * base.held_bytes[row, at])
        elif match is None:  # before its forward and after its backward a part holds the same, whatever is done to it
            held[at] = int(stays * base.held_bytes[row, at])
        else:
            held[at] = max(0, mine[match] + beside[at])
            if found is not base:
                held[at] += int(stays * base.states_bytes[row]) - found.states_bytes[source]
        # What is outside answers for the intervals outside, each part for its own.
        answers = interval.outside if number == OUTSIDE else (interval.part == number and not interval.outside)
        if answers and match is not None:
            slack[at] = found.slack_bytes[match]
    taken = np.maximum(0.0, found.seconds[source] + base.seconds[row] - base.seconds[source])
    return Effect(held, slack, float(taken[0]), float(taken[1]), waits_seconds=float(found.waits_seconds[source]))


def _no_faster(effect: Effect, as_it_is: Effect) -> Effect:
    """The effect with no less time than without the candidate: where a device waits for its host, another candidate in
    the same trial may take the waits.
    """
    return replace(
        effect,
        forward_seconds=max(effect.forward_seconds, as_it_is.forward_seconds),
        backward_seconds=max(effect.backward_seconds, as_it_is.backward_seconds),
    )


def _beside(base: Attribution, row: int, source: int, number: int, source_number: int) -> Bytes:
    """[interval] what the part in `row` holds as it is beside what the source, which is alike, holds where it is.

    Parts that are alike differ a little where they meet their neighbours, whatever is done to them: the input of the
    first of a row is the batch, which does not count to it.
    """
    if row == source:
        return np.zeros(len(base.intervals), dtype=np.int64)
    theirs = base.held_bytes[source]
    matches = _matches(base.intervals, base.intervals, number, source_number, theirs)
    found = [
        0 if match is None else held - theirs[match]
        for held, match in zip(base.held_bytes[row].tolist(), matches, strict=True)
    ]
    return np.array(found, dtype=np.int64)


def _owed(base: Attribution, found: Attribution, source: int, tried: frozenset[int]) -> Bytes:
    """[interval of `found`] what the source's candidate makes others hold, less what it holds because of theirs.

    What two parts keep (a result that its activation and the convolution behind it both need) counts to the one that
    lets go of it last. If that one no longer keeps it, the other still does, and did not decide that.
    """
    owed = np.zeros(len(found.intervals), dtype=np.int64)
    columns = {interval: at for at, interval in enumerate(base.intervals)}
    known = [(at, columns[interval]) for at, interval in enumerate(found.intervals) if interval in columns]
    there, here = (np.array(each, dtype=np.int64) for each in zip(*known, strict=True))
    outside = len(base.held_bytes) - 1
    for pair in sorted({*found.handed_bytes, *base.handed_bytes}):
        holder, maker = pair
        if source not in pair or maker not in tried:
            continue
        now, before = found.handed_bytes.get(pair), base.handed_bytes.get(pair)
        more = (0 if now is None else now[there]) - (0 if before is None else before[here])
        if holder in tried:
            more = np.maximum(0, more)  # that it holds less is its own doing
        if holder == outside:
            # In place of what another made: the gradient that runs past all blocks is summed in place into the tensor
            # of the last that made one, and counts to what is outside, where it ends.
            held = found.held_bytes[outside, there] - found.states_bytes[outside]
            rise = np.maximum(0, held - base.held_bytes[outside, here] + base.states_bytes[outside])
            turn = [_is_turn(found.intervals[at], source) for at in there]  # before the other's is gone
            more = np.where(turn, more, np.minimum(more, rise))
        owed[there] += more if maker == source else -more
    return owed


def _matches(
    wanted: tuple[Interval, ...], found: tuple[Interval, ...], part: int, source: int, held: Bytes
) -> list[int | None]:
    """For each wanted interval the number of the found one that is to `source` what it is to `part`.

    As far before or after the part's own turn in the same phase, or as near to that as there is. `held` is what the
    source holds at the found ones.
    """
    matches: list[int | None] = []
    for phase in Phase:
        rows = [at for at, interval in enumerate(wanted) if interval.phase is phase]
        others = [at for at, interval in enumerate(found) if interval.phase is phase]
        if not others:
            matches += [None] * len(rows)
            continue
        if part == source:
            by_key = {found[at]: at for at in others}
            there = [by_key.get(wanted[at]) for at in rows]
            for place, match in enumerate(there):
                if match is None:  # it was not there: what is held at the one before and at the one after
                    ways = there[:place][::-1], there[place:]
                    around = [at for way in ways for at in [each for each in way if each is not None][:1]]
                    match = min(around, key=held.__getitem__, default=others[0])
                matches.append(match)
            continue
        own = next((place for place, at in enumerate(rows) if _is_turn(wanted[at], part)), 0)
        turn = next((place for place, at in enumerate(others) if _is_turn(found[at], source)), 0)
        for place in range(len(rows)):
            away = place - own
            # Beyond the source's first or last interval, what is kept from forward to backward is there as at that
            # interval; before and after that there is nothing of it.
            if not -turn <= away < len(others) - turn:
                kept = (away > 0) == (phase is Phase.FORWARD)
                away = max(-turn, min(away, len(others) - 1 - turn)) if kept else 0
            matches.append(others[turn + away] if away or place == own else None)
    order = [at for phase in Phase for at, interval in enumerate(wanted) if interval.phase is phase]
    placed: list[int | None] = [None] * len(wanted)
    for at, match in zip(order, matches, strict=True):
        placed[at] = match
    return placed


def _turn(intervals: tuple[Interval, ...]) -> int:
    """The first one of backward."""
    return next((at for at, interval in enumerate(intervals) if interval.phase is Phase.BACKWARD), len(intervals) - 1)


def _is_turn(interval: Interval, part: int) -> bool:
    return interval.part == part and not interval.outside


def _with_moves(
    candidate: Candidate,
    effect: Effect,
    known: Mapping[Candidate, Effect],
    base: Attribution,
    row: int,
    hardware: Hardware,
) -> Effect:
    """The effect with what it moves: what it no longer keeps, and would without its moves."""
    moves = candidate.techniques & MOVES
    out = 0
    turn = _turn(base.intervals)
    if "offload" in moves and (unmoved := known.get(candidate.unmoved)) is not None:
        out = max(0, int(unmoved.held_bytes[turn] - effect.held_bytes[turn]))
    if "stream" not in moves:
        # Where nothing moves, nothing is waited for, whatever neighbours of the trial did.
        return replace(effect, out_bytes=out, waits_seconds=effect.waits_seconds if moves else 0.0)
    parameters_bytes, states_bytes = int(base.parameters_bytes[row]), int(base.states_bytes[row])
    # Parameters and gradients are read and parameters written; states go through several loops with temporaries.
    traffic = 2 * parameters_bytes + int(base.gradients_bytes[row]) + _STATE_PASSES * states_bytes
    saved = float(base.seconds[:, 2].sum()) * parameters_bytes / max(1, int(base.parameters_bytes.sum()))
    return replace(
        effect,
        out_bytes=out + int(base.gradients_bytes[row]),
        update_seconds=max(0.0, host_seconds(traffic, hardware) - saved),
    )
