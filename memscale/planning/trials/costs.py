"""`Costs`: the bytes and seconds of each candidate of each part, from a few simulated steps.

Alike parts share their trials: in a model of eighty blocks, twelve blocks try twelve candidates in one simulated step.
Any other block would hold the same bytes before, during and after its own turn as the block that tried the candidate.

"Row" is the number of a part, in the order of the step; the last row is the rest of the model outside all parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from memscale.hardware import Hardware, host_seconds
from memscale.planning.parts.candidates import AS_IT_IS, Candidate, Rules
from memscale.planning.parts.parts import Part
from memscale.planning.trials.trial_rows import MOVES
from memscale.planning.trials.trials import Simulate, Trials, TrialSteps
from memscale.simulation import OUTSIDE, Attribution, Interval, Phase, Trace, attribute

Bytes = npt.NDArray[np.int64]
# Passes of a host optimizer over its states in a step. Source: `_single_tensor_adam` in torch/optim/adam.py, counted by
# simulation.
_STATE_PASSES = 8

#: Marks a candidate that changes a group, in addition to the techniques in the candidate.
GROUPED = frozenset({"group"})

#: The number of the chosen candidate for each part; the last number is for the rest of the model.
Assignment = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of a candidate on the step.

    Attributes:
        held_bytes: [interval] the most bytes that the part holds in the interval.
        slack_bytes: [interval] at the part's own intervals: the sum over all parts of `held_bytes`, less the most bytes
            that all parts hold at one moment. Parts reach their maxima at different moments of an interval.
        forward_seconds, backward_seconds: seconds of the part's operators.
        out_bytes: bytes that are on another tier from the part's forward to its backward.
        waits_seconds: seconds that the device waits for the part's copies.
        update_seconds: seconds of the host's update of offloaded parameters, less the device's seconds for that update.
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
        """Returns the seconds that moves of bytes take in addition to the seconds of the operators."""
        return self.waits_seconds + self.update_seconds

    @property
    def seconds(self) -> float:
        """Returns the seconds that the candidate adds to the step."""
        return self.forward_seconds + self.backward_seconds + self.moving_seconds


@dataclass(frozen=True, eq=False)
class Costs:
    """The effects of all candidates of all parts, and the costs that no choice changes.

    Attributes:
        intervals: the intervals of the step.
        parts: the parts to decide about, in the order of the step, then the groups. A group is a part around other
            parts, its members. A candidate of a group other than `AS_IT_IS` requires that the members are unchanged,
            and its effect is the addition to the members' effects.
        candidates: the candidates of each part, and last of the rest of the model.
        effects: the effects of the candidates, in the same order.
        fixed_seconds: seconds of the optimizer.
        rejected: the candidates that are impossible, with the reasons.
        together_bytes: [interval] bytes of the optimizer's temporaries that an update of all parameters at once takes
            and an update with some parameters on another tier saves (see `stepping.loop_share`). None means zeros.
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
        """Returns the paths of the parts that are not groups."""
        return [part.path for part in self.parts if not part.members]

    @functools.cached_property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """Returns the members of each group, both as row numbers."""
        return {row: part.members for row, part in enumerate(self.parts) if part.members}

    def covered(self, assignment: Assignment) -> frozenset[int]:
        """Returns the row numbers of the members of groups that an assignment changes."""
        return frozenset(each for row, members in self.groups.items() if assignment[row] for each in members)

    @property
    def turn(self) -> int:
        """Returns the number of the interval at which backward begins."""
        return _turn(self.intervals)

    @property
    def as_it_is(self) -> Assignment:
        """Returns the assignment that changes nothing."""
        return (0,) * len(self.candidates)

    def techniques(self, row: int, number: int) -> frozenset[str]:
        """Returns the techniques of a candidate, with `GROUPED` if the candidate changes a group."""
        return self.candidates[row][number].techniques | (GROUPED if number and row in self.groups else frozenset())

    def rules(self, assignment: Assignment) -> Rules:
        """Returns the plan's rules for an assignment, in the order of the step."""
        paths = [*(part.path for part in self.parts), ""]
        chosen = (menu[number] for menu, number in zip(self.candidates, assignment, strict=True))
        return tuple(itertools.chain.from_iterable(each.at(path) for each, path in zip(chosen, paths, strict=True)))

    def held_bytes(self, assignment: Assignment) -> Bytes:
        """Returns [interval] the most bytes that the step holds under an assignment."""
        chosen = [menu[number] for menu, number in zip(self.effects, assignment, strict=True)]
        held: Bytes = np.sum([each.held_bytes - each.slack_bytes for each in chosen], axis=0)
        return held - self.together_bytes if self.together_bytes is not None and self.streams(assignment) else held

    def streams(self, assignment: Assignment) -> bool:
        """Returns whether some parameters live on another tier under an assignment."""
        chosen = (menu[number] for menu, number in zip(self.candidates, assignment, strict=True))
        return any("stream" in each.techniques for each in chosen)

    def seconds(self, assignment: Assignment) -> float:
        """Returns the seconds of the step under an assignment."""
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
    """Returns the costs of the candidates in `menus`, from trial steps.

    Args:
        plain: the trace of the step as written, with its update.
        parts: the parts of the model.
        menus: the candidates of each part, and last of the rest of the model, `AS_IT_IS` first; alike parts have equal
            menus.
        simulate: returns the trace of a step with rules, of the model without some parts.
        trials: the trials of earlier calls; new trials are added.
        most: the most rounds of trial steps; candidates without a trial after these rounds are rejected.
        loop_share: the share of the update's temporaries that remains where some parameters live on another tier.
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
                effect = _effect(base, trial.found, row, trial.row, trial.tried, moves=moves, written=trial.written)
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


def costs_of_step(plain: Trace, parts: tuple[Part, ...], chosen: Sequence[Candidate], step: Trace) -> Costs:
    """Returns the costs of one candidate for each part, measured in one simulated step with all these candidates.

    Args:
        plain: the trace of the step as written, with its update.
        parts: the parts.
        chosen: the candidate of each part.
        step: the trace of the step with the candidates.
    """
    base, found = (attribute(each, [part.path for part in parts]) for each in (plain, step))
    every = dict(enumerate(chosen))
    effects = [
        (_effect(base, base, row, row), _effect(base, found, row, row, every, moves=bool(each.techniques & MOVES)))
        for row, each in enumerate((*chosen, AS_IT_IS))
    ]
    return Costs(
        base.intervals,
        parts,
        (*((AS_IT_IS, each) for each in chosen), (AS_IT_IS,)),
        (*effects[:-1], effects[-1][:1]),
        float(base.seconds[:, 2].sum()),
        {},
    )


def _moment_bytes(base: Attribution) -> Bytes:
    """Returns [interval] the bytes of the optimizer's temporaries."""
    outside = base.held_bytes[-1]
    steps = np.array([interval.phase is Phase.OPTIMIZER for interval in base.intervals])
    found: Bytes = np.where(steps, np.maximum(0, outside - outside[0]), 0)
    return found


def _effect(
    base: Attribution,
    found: Attribution,
    row: int,
    source: int,
    tried: Mapping[int, Candidate] = MappingProxyType({}),
    *,
    moves: bool = False,
    written: Attribution | None = None,
) -> Effect:
    """Returns the effect on the part in `row` of the candidate that the alike part in `source` tried.

    Args:
        base: the attribution of the step as written.
        found: the attribution of the trial step.
        row: the part that the effect is for.
        source: the part that tried the candidate.
        tried: the candidates that all rows tried in the trial step.
        moves: whether the candidate moves bytes.
        written: the attribution of the step as written that the trial step differs from; None is `base`. Under an
            optimizer strategy, a candidate changes the step by as much as without the strategy.
    """
    written = written or base
    held = np.zeros(len(base.intervals), dtype=np.int64)
    slack = np.zeros(len(base.intervals), dtype=np.int64)
    number, source_number = (OUTSIDE if each == len(base.held_bytes) - 1 else each for each in (row, source))
    mine = found.held_bytes[source] + _owed(written, found, source, tried)
    if written is not base:
        mine += _other_bytes(base, written, found.intervals, source)
    matches = _matches(base.intervals, found.intervals, number, source_number, mine)
    extra = _extra_bytes(base, row, source, number, source_number)
    if moves:  # the candidate may move away the bytes that only the source holds as written: subtract nothing
        extra = np.maximum(0, extra)
    # Only small parameters of a streamed part stay on the device, with their states and updates.
    parameters_bytes = int(base.parameters_bytes[row])
    stays = min(1.0, found.parameters_bytes[source] / parameters_bytes) if parameters_bytes else 1.0
    for at, (interval, match) in enumerate(zip(base.intervals, matches, strict=True)):
        if interval.phase is Phase.OPTIMIZER:
            # A trial step has no update; parameters on another tier are updated on that tier.
            held[at] = int(stays * base.held_bytes[row, at])
        elif match is None:  # before its forward and after its backward a part holds equal bytes under all candidates
            held[at] = int(stays * base.held_bytes[row, at])
        else:
            held[at] = max(0, mine[match] + extra[at])
            if found is not base:
                held[at] += int(stays * base.states_bytes[row]) - found.states_bytes[source]
        # A part has the slack of its own intervals; the rest of the model has the slack of intervals outside all parts.
        matching = interval.outside if number == OUTSIDE else (interval.part == number and not interval.outside)
        if matching and match is not None:
            slack[at] = found.slack_bytes[match]
    taken = np.maximum(0.0, found.seconds[source] + base.seconds[row] - written.seconds[source])
    return Effect(held, slack, float(taken[0]), float(taken[1]), waits_seconds=float(found.waits_seconds[source]))


def _other_bytes(base: Attribution, written: Attribution, intervals: Sequence[Interval], source: int) -> Bytes:
    """Returns [interval] the bytes of the part in `source` in `base` less those in `written`, without states."""
    of_base, of_written = (
        dict(zip(each.intervals, (each.held_bytes[source] - each.states_bytes[source]).tolist(), strict=True))
        for each in (base, written)
    )
    return np.array(
        [of_base[each] - of_written[each] if each in of_base and each in of_written else 0 for each in intervals],
        dtype=np.int64,
    )


def _no_faster(effect: Effect, as_it_is: Effect) -> Effect:
    """Returns the effect with at least the seconds of the part as written.

    Where the device waits for the host, the waits of this part may be charged to another part of the same trial step.
    """
    return replace(
        effect,
        forward_seconds=max(effect.forward_seconds, as_it_is.forward_seconds),
        backward_seconds=max(effect.backward_seconds, as_it_is.backward_seconds),
    )


def _extra_bytes(base: Attribution, row: int, source: int, number: int, source_number: int) -> Bytes:
    """Returns [interval] the bytes of the part in `row` less those of the alike part `source`, both unchanged.

    Alike parts differ a little at their borders under any candidate. Example: the input of the first block may be the
    batch, whose bytes count to the rest of the model.
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


def _owed(base: Attribution, found: Attribution, source: int, tried: Mapping[int, Candidate]) -> Bytes:
    """Returns [interval of `found`] bytes to charge to the source in addition to the bytes that the source holds.

    A tensor that two parts keep (such as the result of an activation, an input of the next convolution) counts to the
    part that frees the tensor last. If a candidate makes that part drop the tensor, the tensor counts to the other
    part. These bytes are charged to the part whose candidate caused the change: bytes that other parts hold due to the
    source's candidate are added, bytes that the source holds due to other parts' candidates are subtracted.
    """
    owed = np.zeros(len(found.intervals), dtype=np.int64)
    columns = {interval: at for at, interval in enumerate(base.intervals)}
    known = [(at, columns[interval]) for at, interval in enumerate(found.intervals) if interval in columns]
    in_trial, in_base = (np.array(each, dtype=np.int64) for each in zip(*known, strict=True))
    outside, turn = len(base.held_bytes) - 1, _turn(found.intervals)
    for pair in sorted({*found.handed_bytes, *base.handed_bytes}):
        holder, maker = pair
        if source not in pair or maker not in tried:
            continue
        now, before = found.handed_bytes.get(pair), base.handed_bytes.get(pair)
        more = np.zeros(len(in_trial), dtype=np.int64)
        if now is not None:
            more += now[in_trial]
        if before is not None:
            more -= before[in_base]
        if holder in tried:
            # A holder with a trial may hold less due to its own candidate. Of the tensors that the holder keeps for
            # backward, only the maker's output is kept due to the maker's candidate, if that drops the output; other
            # tensors are kept due to the holder's candidate. A streaming holder also holds parameters from the turn of
            # the maker on, as every part before a streaming part does: these stay charged to the maker.
            kept = int(more[in_trial == turn].max(initial=0))
            others = 0 if "stream" in tried[holder].techniques else max(0, kept - int(base.output_bytes[maker]))
            more = np.maximum(0, more - others)
        if holder == outside:
            # The gradient of a residual stream is summed in place, in the tensor of the last block, and counts to the
            # rest of the model, which frees the sum: the source is charged at most the rise of the rest's own bytes.
            held = found.held_bytes[outside, in_trial] - found.states_bytes[outside]
            rise = np.maximum(0, held - base.held_bytes[outside, in_base] + base.states_bytes[outside])
            own = [_is_turn(found.intervals[at], source) for at in in_trial]  # the source then holds both
            more = np.where(own, more, np.minimum(more, rise))
        owed[in_trial] += more if maker == source else -more
    return owed


def _matches(
    wanted: tuple[Interval, ...], found: tuple[Interval, ...], part: int, source: int, held: Bytes
) -> list[int | None]:
    """Returns for each interval in `wanted` the number of the corresponding interval in `found`; None without one.

    An interval of `part` corresponds to the interval at the same distance from the turn of `source` in the same phase,
    or to the nearest.

    Args:
        wanted: the intervals to match.
        found: the intervals of the trial step.
        part: the part that `wanted` is for.
        source: the part that tried the candidate.
        held: [interval of `found`] bytes that the source holds.
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
            nearest = [by_key.get(wanted[at]) for at in rows]
            for place, match in enumerate(nearest):
                if match is None:  # absent from the trial step: the neighbour at which the source holds fewer bytes
                    sides = nearest[:place][::-1], nearest[place:]
                    around = [at for side in sides for at in [each for each in side if each is not None][:1]]
                    match = min(around, key=held.__getitem__, default=others[0])
                matches.append(match)
            continue
        own = next((place for place, at in enumerate(rows) if _is_turn(wanted[at], part)), 0)
        turn = next((place for place, at in enumerate(others) if _is_turn(found[at], source)), 0)
        for place in range(len(rows)):
            distance = place - own
            # Beyond the source's intervals: between the part's turns in forward and backward the nearest interval has
            # the kept bytes; before forward and after backward the candidate has no effect.
            if not -turn <= distance < len(others) - turn:
                kept = (distance > 0) == (phase is Phase.FORWARD)
                distance = max(-turn, min(distance, len(others) - 1 - turn)) if kept else 0
            matches.append(others[turn + distance] if distance or place == own else None)
    order = [at for phase in Phase for at, interval in enumerate(wanted) if interval.phase is phase]
    placed: list[int | None] = [None] * len(wanted)
    for at, match in zip(order, matches, strict=True):
        placed[at] = match
    return placed


def _turn(intervals: tuple[Interval, ...]) -> int:
    """Returns the number of the first interval of backward."""
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
    """Returns the effect with the bytes that the candidate moves, and the seconds of a streamed part's update.

    The bytes that an offload moves are those that the part keeps without the offload less those kept with the offload.
    """
    moves = candidate.techniques & MOVES
    out = 0
    turn = _turn(base.intervals)
    if "offload" in moves and (unmoved := known.get(candidate.unmoved)) is not None:
        out = max(0, int(unmoved.held_bytes[turn] - effect.held_bytes[turn]))
    if "stream" not in moves:
        # Only moves cause waits: the waits in the trial of a candidate without moves belong to other parts.
        return replace(effect, out_bytes=out, waits_seconds=effect.waits_seconds if moves else 0.0)
    parameters_bytes, states_bytes = int(base.parameters_bytes[row]), int(base.states_bytes[row])
    # Host traffic in bytes: parameters are read and written, gradients are read, and states are passed several times.
    traffic = 2 * parameters_bytes + int(base.gradients_bytes[row]) + _STATE_PASSES * states_bytes
    saved = float(base.seconds[:, 2].sum()) * parameters_bytes / max(1, int(base.parameters_bytes.sum()))
    return replace(
        effect,
        out_bytes=out + int(base.gradients_bytes[row]),
        update_seconds=max(0.0, host_seconds(traffic, hardware) - saved),
    )
