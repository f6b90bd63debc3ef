"""Optimizer strategies: the transforms of the optimizer that a plan may contain, and the choice of helpful ones."""

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

# Share of the parameter bytes in one group of `step_in_groups`, and the most bytes of one: bound the temporaries of the
# update; more groups take longer: benchmarks/bench_optimizers.py.
_GROUP_SHARE, _MOST_GROUP_BYTES = 1 / 16, 2**26
# Temporaries of Adam's update of one parameter, as multiples of the parameter's bytes. Source: `_single_tensor_adam` in
# torch/optim/adam.py, the root of the second moment and its quotient.
_OF_ONE = 2
#: Share of the bytes of a phase or of the peak: a strategy or a remedy that lowers none by more is dropped. By choice.
LEAST_GAIN = 1e-3


@dataclass(frozen=True, eq=False)
class Strategy:
    """An optimizer strategy: a transform of the optimizer, simulated.

    Attributes:
        how: the transform of the optimizer.
        plain: the trace of the step with `how`, and with no transform of the model.
    """

    how: Transform
    plain: Trace

    @property
    def rules(self) -> Rules:
        """Returns the rules of a plan that apply the strategy."""
        return (("", self.how),)


def checked(stepping: Iterable[str | Transform]) -> dict[str, Transform | None]:
    """Returns the optimizer transforms that a plan may use, by name; None for a name without the caller's options.

    Raises:
        ConfigError: an element of `stepping` is no optimizer transform, or a name appears twice.
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
    """Returns the allowed transforms, and compositions of allowed transforms, that apply to `optimizer`.

    Args:
        optimizer: the optimizer of the step. A transformed optimizer gets no further transform, except that transforms
            of rounding are innermost and leave room for others.
        allowed: the result of `checked`.
        moves: whether there is a tier below the device whose rate is known.
    """
    if optimizer is None or (isinstance(optimizer, TransformedOptimizer) and not optimizer.only_rounds):
        return []
    nbytes = sum(each.nbytes for group in optimizer.param_groups for each in group["params"])
    group_bytes = max(1, min(_MOST_GROUP_BYTES, int(nbytes * _GROUP_SHARE)))
    groups = _of(allowed, "step_in_groups", step_in_groups(group_bytes=group_bytes))
    small = _of(allowed, "quantize_states", quantize_states())
    below = _of(allowed, "offload_states", offload_states()) if moves else []
    late = [*groups, *small, *below, *(compose(one, other) for one in below for other in small)]
    # Excludes `step_in_groups`: under `step_in_backward` each parameter is a group of its own.
    apart = [each for each in late if each not in groups]
    early = _of(allowed, "step_in_backward", step_in_backward())
    found = [*late, *early, *(compose(one, other) for one in early for other in apart)]
    return [how for how in found if _applies(how, optimizer)]


def _of(allowed: Mapping[str, Transform | None], name: str, usual: Transform) -> list[Transform]:
    return [allowed[name] or usual] if name in allowed else []


def loop_share(optimizer: torch.optim.Optimizer | None, hardware: Hardware) -> float:
    """Returns the share of the update's temporaries that remains where some parameters live on another tier.

    On CUDA, PyTorch's default is the ``foreach`` loop, which updates all parameters at once. With a parameter on
    another device PyTorch falls back to the loop over single parameters, whose temporaries are those of one parameter.
    """
    if optimizer is None or hardware.device_type != "cuda":
        return 1.0
    groups = optimizer.param_groups
    if any(group.get("fused") or group.get("foreach", False) is not None for group in groups):
        return 1.0
    nbytes: list[int] = [each.nbytes for group in groups for each in group["params"]]
    return min(1.0, _OF_ONE * max(nbytes, default=1) / max(1, sum(nbytes)))


def strategies(hows: Iterable[Transform], plain: Trace, simulate: Callable[[Rules, bool], Trace]) -> list[Strategy]:
    """Returns the strategies that lower the most bytes held in at least one phase of the step, the fastest first.

    Args:
        hows: the transforms of the optimizer to try.
        plain: the trace of the step as written.
        simulate: returns the trace of the step with rules, and with its update if the second argument is true.
    """
    found = []
    before = held_by_phase(analyse(plain))
    for how in hows:
        try:
            strategy = Strategy(how, simulate((("", how),), True))
        except MemscaleError:  # for example on FSDP2's shards, or an update in backward before DDP's all-reduce
            continue
        after = held_by_phase(analyse(strategy.plain))
        if any(after.get(phase, 0) < (1 - LEAST_GAIN) * nbytes for phase, nbytes in before.items()):
            found.append(strategy)
    return sorted(found, key=lambda strategy: (analyse(strategy.plain).step_seconds or 0.0, len(repr(strategy.how))))


def least_held(strategy: Strategy) -> tuple[int, ...]:
    """Returns the key that orders strategies by the smallest peak that a plan can reach with each of them.

    The key is (bytes that no plan for the model frees, bytes that the step takes as written). The first are the bytes
    held at the end of the step, which are parameters and states, and the gradients held at the peak.
    """
    profile = analyse(strategy.plain)
    return int(profile.timeline.total_bytes[-1]) + profile.by_category.get("gradient", 0), profile.taken_bytes


def held_by_phase(profile: Profile) -> dict[str, int]:
    """Returns the most bytes held in each phase of a step, by the phase's name."""
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
    except MemscaleError:  # the optimizer couples parameters, or bitsandbytes is missing
        return False
    assert isinstance(made, TransformedOptimizer), "it has a transform"
    made.let_go()
    return True
