"""Profiles of real steps, for a step that cannot be simulated; every change of the real steps is undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from memscale.config import Config
from memscale.core import ConfigError, RuntimeUnavailable
from memscale.core import tensors as tensors_of
from memscale.hardware import Hardware
from memscale.optimizers import TransformedOptimizer
from memscale.regions import without_side_effects
from memscale.simulation.measured.allocator_trace import AllocatorTrace, measure, training_roles
from memscale.simulation.parallel.spec import Parallel, is_distributed
from memscale.simulation.results import Moment, Profile
from memscale.simulation.sandbox.step_scope import StepScope
from memscale.simulation.step import TrainingStep
from memscale.simulation.trace import CATEGORIES


def measured_profile(training_step: TrainingStep, config: Config, hardware: Hardware, reason: str) -> Profile:
    """Returns the profile of a real step, measured after a first one and ``config.warmup_steps`` more.

    Raises:
        ConfigError: the step itself fails, or is one rank's part of a distributed step.
        RuntimeUnavailable: the step cannot run in this process (tensors on ``meta``), or its tensors are on another
            device than `hardware`.
    """
    step, optimizer, batch = training_step.function([]), training_step.optimizer, training_step.batch
    scope = StepScope(training_step.module, optimizer, step, batch)
    tensors = list({id(tensor): tensor for _, _, tensor in scope.tensors}.values())
    _check_alone(scope, reason)
    device = _device(tensors, hardware, reason)
    optimizers = list({id(found): found for found in (*scope.optimizers, optimizer) if found is not None}.values())
    if any(each.writes_offloaded for each in optimizers if isinstance(each, TransformedOptimizer)):
        raise ConfigError(
            f"this step cannot be simulated: {reason}; and a real run would change states that are on disk, which "
            "cannot be restored. Profile it with the optimizer before offload_states(tier='disk')"
        )
    with without_side_effects(scope, tensors, tensors, computes=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            roles = _roles(scope, optimizers, [batch, tensors])  # tensors without another role, as of a closure: input
            first = measure(step, device=device, roles=roles)
            # A CPU's allocator reports the release of a storage only if a recording saw its allocation.
            warm = partial(measure, step) if device.type == "cpu" else step
            for _ in range(config.warmup_steps):
                warm()
            trace = measure(step, device=device, roles=roles)
        except ConfigError:
            raise
        except Exception as error:  # the caller's model and loss may raise any error
            raise ConfigError(
                f"the step fails when it runs: {type(error).__name__}: {error}. It must run once with this batch "
                "before its memory can be measured; check that the batch is what the model is called with, "
                "and that the loss takes the output and this batch"
            ) from error
    notes = [f"measured on real steps, since it cannot be simulated: {reason}"]
    notes += dict.fromkeys(str(warning.message) for warning in caught if "upper bound" in str(warning.message))
    return _profile(trace, first, hardware, tuple(notes))


def _check_alone(scope: StepScope, reason: str) -> None:
    """Raises ConfigError for a step whose collectives would wait for other processes, which do not run this step."""
    modules = nn.ModuleList(scope.modules)
    ranks = Parallel.of_distributed(modules)
    if is_distributed(modules) and not (ranks is not None and ranks.kind == "ddp" and ranks.world == 1):
        raise ConfigError(
            f"the step cannot be simulated ({reason}), and its collectives would wait for other processes "
            f"({ranks or 'its parameters are DTensors'}), so it cannot be measured here. If the model itself raises "
            "that error, mend the model; if its control flow depends on computed values, make it independent of "
            "these, or profile the plain model in one process"
        )


def _device(tensors: list[torch.Tensor], hardware: Hardware, reason: str) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if any(device.type == "meta" for device in devices):
        raise RuntimeUnavailable(
            f"the step cannot be simulated ({reason}) and not be run either, with tensors on meta; build the model on "
            "a real device, or make its control flow independent of computed values"
        )
    accelerators = sorted({device for device in devices if device.type != "cpu"}, key=str)
    device = accelerators[0] if accelerators else torch.device("cpu")
    if device.type != hardware.device_type:
        raise RuntimeUnavailable(
            f"the step cannot be simulated ({reason}), and on {device} it cannot be measured for {hardware.name}; run "
            "it there, or make its control flow independent of computed values"
        )
    return device


def _roles(scope: StepScope, optimizers: list[torch.optim.Optimizer], batch: Any) -> Callable[[], dict[str, Any]]:
    modules = nn.ModuleList(module for module in scope.modules)

    def roles() -> dict[str, Any]:
        found = dict(training_roles(modules, None, batch)())
        found["optimizer state"] = tensors_of([list(optimizer.state.values()) for optimizer in optimizers])
        return found

    return roles


def _profile(trace: AllocatorTrace, first: AllocatorTrace, hardware: Hardware, notes: tuple[str, ...]) -> Profile:
    total = trace.timeline.total_bytes
    peak = int(total.argmax())
    live = trace.timeline.live_bytes
    changes, positions, events = [], [], []
    for name, values in live.items():
        category = CATEGORIES.index(name)
        deltas = np.diff(values, prepend=0)
        for at in np.flatnonzero(deltas):
            changes.append((category, int(deltas[at])))
            positions.append(float(trace.timeline.position[at]))
            events.append(int(at))
    order = sorted(range(len(changes)), key=events.__getitem__)
    backward = trace.backward_seconds
    at_peak = float(trace.timeline.position[peak])
    return Profile(
        method="empirical",
        notes=notes,
        hardware=hardware,
        peak_bytes=trace.peak_bytes,
        first_step_peak_bytes=first.peak_bytes,
        reserved_peak_bytes=torch.cuda.max_memory_reserved() if hardware.device_type == "cuda" else None,
        moment=Moment("", "", "forward" if backward is None or at_peak < backward else "backward"),
        by_category={name: int(values[peak]) for name, values in live.items() if values[peak]},
        categories_by_module={},
        by_tier={},
        holdings=(),
        flops=0,
        step_seconds=trace.seconds,
        exposed_seconds={},
        prefetch_depth=None,
        seconds_by_module={},
        changes=tuple(changes[at] for at in order),
        positions=tuple(positions[at] for at in order),
        position_unit="seconds",
        phases=trace.timeline.phases,
        schedule=None,
    )
