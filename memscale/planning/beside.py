"""What else would lower a step's peak where no plan does: other loops of the optimizer, more shards, other steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import Argument, MemscaleError, format_bytes, matches
from memscale.planning.parts.blocks import repeated_blocks
from memscale.planning.remedies import optimizer_options, other_loops
from memscale.planning.stepping import held_by_phase, hows
from memscale.simulation import Parallel, Profile, TrainingStep

# What lowers a peak by less than this share is not told.
_LEAST_GAIN = 1e-3
# An update that holds this share of the peak is what the peak is about, or will be when the rest is less.
_UPDATES = 0.8
# Of the parameters outside of the blocks, in a module that is worth a shard of its own: less is a norm's.
_SHARE = 1 / 100

#: Simulates the step under a plan, as one process's of these.
Simulate = Callable[[Plan, Parallel | None], Profile]


@dataclass(frozen=True)
class Setting:
    """A step, as far as it may be another one.

    Attributes:
        plan: of it.
        parallel: whose it is.
        options: of the optimizer's groups.
        said: what of this the caller would have to write.
    """

    plan: Plan
    parallel: Parallel | None
    options: dict[str, bool] = field(default_factory=dict)
    said: tuple[Argument, ...] = ()


def beside(
    setting: Setting, profile: Profile, limit: int, simulate: Simulate, *, step: TrainingStep
) -> Iterator[tuple[tuple[Argument, ...], Profile]]:
    """What lowers the peak of `setting` to `limit` or towards it, in words, and the step's profile then: first nothing,
    then more and more of it, the last one the best.

    Each is tried on top of those before it that helped: what the peak is made of decides which comes next, and what did
    not help is tried once more when another one has.

    Args:
        setting: the step under the smallest plan.
        profile: of it.
        limit: what it may take.
        simulate: another one.
        step: whose model and optimizer these are.
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
        except MemscaleError:  # the optimizer or the processes do not go with it
            continue
        if found.taken_bytes < (1 - _LEAST_GAIN) * least:
            setting, profile, least = other, found, found.taken_bytes
            yield setting.said, profile
            tried.clear()  # what freed nothing at another peak may at this one


def lighter_update(profile: Profile, limit: int, optimizer: torch.optim.Optimizer | None) -> str | None:
    """What a caller of a plan that moves parameters may write instead, where it is the update of the step as it is that
    fills the budget; None where it does not, or there is nothing else.
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
        f"parameters move because while the optimizer steps {format_bytes(held)} are held, of a budget of "
        f"{format_bytes(limit)}; it is less with {' or '.join(map(str, said))}"
    )


def _loops(step: Setting, optimizer: torch.optim.Optimizer | None) -> Iterator[Setting]:
    """Of an optimizer whose step makes much for a moment."""
    for options in () if step.options else other_loops(optimizer):
        if options.get("fused"):
            yield replace(step, options=options, said=(*step.said, _fused(optimizer)))
    groups = {} if step.options or step.plan.of_optimizers() else {"step_in_groups": None}
    for how in hows(optimizer, groups, moves=False):
        plan = Plan([*((rule.pattern, rule.transform) for rule in step.plan), ("", how)])
        yield replace(step, plan=plan, said=(*step.said, _stepping("step_in_groups")))


def _shards(step: Setting, model: nn.Module) -> Iterator[Setting]:
    """Of what FSDP2's root keeps gathered from forward to the end of backward, such as embedding and head."""
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
    # Two modules of one weight would gather it twice, which FSDP2 does not allow.
    paths = [
        path
        for path, found in outside.items()
        if sum(each.nbytes for each in found) > _SHARE * whole and all(uses[id(each)] == 1 for each in found)
    ]
    if paths:
        shard = (*blocks, *paths)
        yield replace(step, parallel=replace(spec, shard=shard), said=(*step.said, Argument("", "shard", shard)))


def _in_backward(step: Setting, optimizer: torch.optim.Optimizer | None) -> Iterator[Setting]:
    if step.plan.of_optimizers():
        return
    for how in hows(optimizer, {"step_in_backward": None}, moves=False):
        plan = Plan([*((rule.pattern, rule.transform) for rule in step.plan), ("", how)])
        yield replace(step, plan=plan, said=(*step.said, _stepping("step_in_backward")))


def _fused(optimizer: torch.optim.Optimizer | None) -> Argument:
    return Argument(type(optimizer).__name__, "fused", True)


def _stepping(name: str) -> Argument:
    return Argument("", "stepping", (name,))


def _ends(path: str) -> list[int]:
    """Where the paths of the modules around `path` end, and its own."""
    return [at for at, letter in enumerate(path) if letter == "."] + [len(path)]
