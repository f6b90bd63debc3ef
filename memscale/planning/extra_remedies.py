"""Remedies outside the plan, for a step that no plan fits: an optimizer's `fused` loop, FSDP2 shards, `stepping`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import Argument, MemscaleError, format_bytes, matches
from memscale.planning.parts.blocks import repeated_blocks
from memscale.planning.remedies import optimizer_options, other_loops
from memscale.planning.stepping import LEAST_GAIN, held_by_phase, hows
from memscale.simulation import Parallel, Profile, TrainingStep

# Share of the peak: where the optimizer phase holds as much, remedies of the update are tried first, since the update
# is the peak or becomes the peak once the other phases hold less; refusals take more simulations with less:
# benchmarks/bench_plan.py --smallest.
_UPDATES = 0.8
# Share of the parameter bytes outside the blocks: a module with more gets a shard of its own (a norm has less); peaks
# of sharded steps: benchmarks/bench_many_cards.py.
_SHARE = 1 / 100

#: Returns the profile of the step under a plan, as one process of a parallel spec (None: one process alone).
Simulate = Callable[[Plan, Parallel | None], Profile]


@dataclass(frozen=True)
class Setting:
    """The variables of a step that a remedy changes.

    Attributes:
        plan: the plan of the step.
        parallel: the parallel spec of the step; None for a single process.
        options: options to set in the optimizer's parameter groups.
        said: the arguments with which the caller would write this setting.
    """

    plan: Plan
    parallel: Parallel | None
    options: dict[str, bool] = field(default_factory=dict)
    said: tuple[Argument, ...] = ()


def extra_remedies(
    setting: Setting, profile: Profile, limit: int, simulate: Simulate, *, step: TrainingStep
) -> Iterator[tuple[tuple[Argument, ...], Profile]]:
    """Yields the remedies that lower the peak of `setting` towards `limit`, with the profile of each changed step.

    The first pair is ``((), profile)``; each later pair has one more remedy and a lower peak, so that the last pair is
    the best. The search is greedy: each remedy is tried on top of the remedies that helped so far, the phase with the
    peak decides which remedy is next, and a remedy that did not help is tried again after another remedy has helped.

    Args:
        setting: the step under the smallest plan.
        profile: the profile of `setting`.
        limit: bytes that the step may take.
        simulate: returns the profile of a changed step.
        step: the training step, with the model and the optimizer.
    """
    assert step.module is not None, "a function is not planned"
    optimizer, least, tried = step.optimizer, profile.taken_bytes, set[Argument]()
    yield (), profile
    while least > limit:
        held = held_by_phase(profile)
        others = [*_shards(setting, step.module), *_in_backward(setting, optimizer)]
        if held.get("optimizer", 0) >= _UPDATES * max(held.values()):
            others = [*_loops(setting, optimizer), *others]
        other = next((each for each in others if each.said[-1] not in tried), None)
        if other is None:
            break
        tried.add(other.said[-1])
        try:
            with optimizer_options(optimizer, other.options):
                found = simulate(other.plan, other.parallel)
        except MemscaleError:  # the optimizer or the parallel spec does not support the remedy
            continue
        if found.taken_bytes < (1 - LEAST_GAIN) * least:
            setting, profile, least = other, found, found.taken_bytes
            yield setting.said, profile
            tried.clear()  # a remedy that freed nothing at the peak before may free something at the new peak


def lighter_update(profile: Profile, limit: int, optimizer: torch.optim.Optimizer | None) -> str | None:
    """Returns the note that a lighter update would spare a plan its moves of parameters; None where it would not.

    Args:
        profile: the profile of the step as written.
        limit: the budget in bytes. The note applies where the optimizer phase alone holds nearly all of the budget.
        optimizer: the optimizer of the step. The note names ``fused=True`` or ``step_in_groups``, whichever applies.
    """
    held = held_by_phase(profile).get("optimizer", 0)
    if held < _UPDATES * limit or optimizer is None:
        return None
    said = [_fused(optimizer) for options in other_loops(optimizer) if options.get("fused")]
    if hows(optimizer, {"step_in_groups": None}, moves=False):
        said.append(_stepping("step_in_groups"))
    if not said:
        return None
    return (
        f"parameters move because the optimizer's step holds {format_bytes(held)}, and the budget is "
        f"{format_bytes(limit)}; {' or '.join(map(str, said))} would hold less"
    )


def _loops(step: Setting, optimizer: torch.optim.Optimizer | None) -> Iterator[Setting]:
    """Yields the settings with fewer temporaries in the update: a fused loop, and `step_in_groups`."""
    for options in () if step.options else other_loops(optimizer):
        if options.get("fused"):
            yield replace(step, options=options, said=(*step.said, _fused(optimizer)))
    groups = {} if step.options or step.plan.of_optimizers() else {"step_in_groups": None}
    for how in hows(optimizer, groups, moves=False):
        plan = Plan([*((rule.pattern, rule.transform) for rule in step.plan), ("", how)])
        yield replace(step, plan=plan, said=(*step.said, _stepping("step_in_groups")))


def _shards(step: Setting, model: nn.Module) -> Iterator[Setting]:
    """Yields the setting with shards for large modules outside the blocks, such as embedding and head.

    FSDP2's root keeps the parameters outside all shards gathered from forward to the end of backward.
    """
    spec = step.parallel
    if spec is None or spec.kind != "fsdp2" or spec.shard is not None:
        return
    blocks = repeated_blocks(model)
    outside = {
        path: [each for each in module._parameters.values() if each is not None]
        for path, module in model.named_modules()
        if path and not any(matches(pattern, path[:at]) for pattern in blocks for at in _ends(path))
    }
    uses: dict[int, int] = {}
    for parameter in (each for found in outside.values() for each in found):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    whole = sum(each.nbytes for found in outside.values() for each in found)
    # Modules with a tied weight are left out: FSDP2 raises where a parameter is in two shards.
    paths = [
        path
        for path, found in outside.items()
        if sum(each.nbytes for each in found) > _SHARE * whole and all(uses[id(each)] == 1 for each in found)
    ]
    if paths:
        shard = (*blocks, *paths)
        yield replace(step, parallel=replace(spec, shard=shard), said=(*step.said, Argument("plan", "shard", shard)))


def _in_backward(step: Setting, optimizer: torch.optim.Optimizer | None) -> Iterator[Setting]:
    if step.plan.of_optimizers():
        return
    for how in hows(optimizer, {"step_in_backward": None}, moves=False):
        plan = Plan([*((rule.pattern, rule.transform) for rule in step.plan), ("", how)])
        yield replace(step, plan=plan, said=(*step.said, _stepping("step_in_backward")))


def _fused(optimizer: torch.optim.Optimizer | None) -> Argument:
    return Argument(type(optimizer).__name__, "fused", True)


def _stepping(name: str) -> Argument:
    return Argument("plan", "stepping", (name,))


def _ends(path: str) -> list[int]:
    """Returns the lengths of the prefixes of `path` that are module paths: the ancestors' and its own."""
    return [at for at, letter in enumerate(path) if letter == "."] + [len(path)]
