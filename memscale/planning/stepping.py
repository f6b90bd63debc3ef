"""How the optimizer steps, as a variable of a plan: the ways that may be taken, and which of them can help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from memscale.algebra import Transform, compose
from memscale.core import ConfigError, MemscaleError, shown
from memscale.hardware import Hardware
from memscale.optimizers import (
    TransformedOptimizer,
    offload_states,
    quantize_states,
    step_in_backward,
    step_in_groups,
    without_states,
)
from memscale.planning.parts.candidates import Rules
from memscale.simulation import Profile, Trace, analyse

NAMES = ("offload_states", "quantize_states", "step_in_backward", "step_in_groups")

# Of the weights, in one group of a step: what it makes for a moment is then no more than this share of them.
_GROUP_SHARE = 1 / 16
_MOST_GROUP_BYTES = 2**26
# Adam's update of one parameter makes two like it, for a moment.
_OF_ONE = 2
# A way that lowers the peak by less than this share is none.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True, eq=False)
class Way:
    """A way to step.

    Attributes:
        how: the transform of the optimizer.
        plain: the step with it, and with no transform of the model.
    """

    how: Transform
    plain: Trace

    @property
    def rules(self) -> Rules:
        """It as a rule of a plan."""
        return (("", self.how),)

    @property
    def keeps_trials(self) -> bool:
        """Whether forward and backward hold what they hold without it but for gradients and states."""
        return "step_in_backward" not in repr(self.how)


def checked(stepping: Iterable[str | Transform]) -> dict[str, Transform | None]:
    """The optimizer transforms that a plan may use, by name, each with the caller's own options where it has any.

    Raises:
        ConfigError: one is none, or there twice.
    """
    found: dict[str, Transform | None] = {}
    for each in [stepping] if isinstance(stepping, (str, Transform)) else stepping:
        name = each if isinstance(each, str) else getattr(each, "spelling", "")
        if name not in NAMES:
            raise ConfigError(
                f"plan(stepping=...) takes optimizer transforms or their names, {', '.join(NAMES)}; got {shown(each)}"
            )
        if name in found:
            raise ConfigError(f"plan(stepping=...) has {name} twice; choose one")
        found[name] = None if isinstance(each, str) else each
    return found


def hows(
    optimizer: torch.optim.Optimizer | None, allowed: Mapping[str, Transform | None], *, moves: bool
) -> list[Transform]:
    """What may be done to `optimizer`, of what is allowed; nothing to one that it does not apply to.

    Args:
        optimizer: of the step. One that is under transforms already has made its choice, but for those of rounding,
            which stand inside of all others.
        allowed: as `checked` returns it.
        moves: whether there is a tier below the device whose speed is known.
    """
    if optimizer is None or (isinstance(optimizer, TransformedOptimizer) and not optimizer.only_rounds):
        return []
    nbytes = sum(each.nbytes for group in optimizer.param_groups for each in group["params"])
    group_bytes = max(1, min(_MOST_GROUP_BYTES, int(nbytes * _GROUP_SHARE)))
    groups = _of(allowed, "step_in_groups", step_in_groups(group_bytes=group_bytes))
    small = _of(allowed, "quantize_states", quantize_states())
    below = _of(allowed, "offload_states", offload_states()) if moves else []
    late = [*groups, *small, *below, *(compose(one, other) for one in below for other in small)]
    # With it a group is one parameter anyway.
    apart = [each for each in late if each not in groups]
    early = _of(allowed, "step_in_backward", step_in_backward())
    found = [*late, *early, *(compose(one, other) for one in early for other in apart)]
    return [how for how in found if _applies(how, optimizer)]


def _of(allowed: Mapping[str, Transform | None], name: str, usual: Transform) -> list[Transform]:
    return [allowed[name] or usual] if name in allowed else []


def loop_share(optimizer: torch.optim.Optimizer | None, hardware: Hardware) -> float:
    """Of what an update makes for a moment, what it makes where some parameters live on another tier.

    On a card PyTorch updates all parameters at once unless it is told how to or one of them is elsewhere, and then each
    alone: to stream one block of a Llama 8B takes 15.7 of 80.4 GB from the update.
    """
    if optimizer is None or hardware.device_type != "cuda":
        return 1.0
    groups = optimizer.param_groups
    if any(group.get("fused") or group.get("foreach", False) is not None for group in groups):
        return 1.0
    nbytes: list[int] = [each.nbytes for group in groups for each in group["params"]]
    return min(1.0, _OF_ONE * max(nbytes, default=1) / max(1, sum(nbytes)))


def ways(hows: Iterable[Transform], plain: Trace, simulate: Callable[[Rules, bool], Trace]) -> list[Way]:
    """The ways that lower the peak of the step as it is or what stays for the whole of it, the fastest first."""
    found = []
    before = held_by_phase(analyse(plain))
    for how in hows:
        try:
            way = Way(how, simulate((("", how),), True))
        except MemscaleError:  # it cannot work on what FSDP2 has of a parameter, or step before DDP has averaged
            continue
        after = held_by_phase(analyse(way.plain))
        if any(after.get(phase, 0) < (1 - _LEAST_GAIN) * nbytes for phase, nbytes in before.items()):
            found.append(way)
    return sorted(found, key=lambda way: (analyse(way.plain).step_seconds or 0.0, len(repr(way.how))))


def least_held(way: Way) -> tuple[int, ...]:
    """What no plan for the model makes smaller, and then what the step takes: the least is that of the smallest plan.

    From its end to the next step it holds parameters and states; of gradients, those that wait for the update.
    """
    profile = analyse(way.plain)
    return int(profile.timeline.total_bytes[-1]) + profile.by_category.get("gradient", 0), profile.taken_bytes


def held_by_phase(profile: Profile) -> dict[str, int]:
    """The most that each phase of a step holds."""
    timeline = profile.timeline
    begins = [np.searchsorted(timeline.position, begin, side="right") for _, begin in timeline.phases]
    ends = [*begins[1:], len(timeline.position)]
    return {
        name: int(timeline.total_bytes[begin:end].max(initial=0))
        for (name, _), begin, end in zip(timeline.phases, begins, ends, strict=True)
    }


def _applies(how: Transform, optimizer: torch.optim.Optimizer) -> bool:
    try:
        made = how(without_states(optimizer))
    except MemscaleError:  # it does not treat each parameter alone, or bitsandbytes is missing
        return False
    assert isinstance(made, TransformedOptimizer), "it has a transform"
    made.let_go()
    return True
