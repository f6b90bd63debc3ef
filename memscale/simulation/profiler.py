"""`MemoryProfiler`: the memory of a training step, simulated; measured on real steps where it cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, PlanLike
from memscale.config import Config, check_config
from memscale.core import ConfigError, Loss, MemscaleError, check_count
from memscale.core import tensors as tensors_of
from memscale.hardware import Hardware
from memscale.simulation.analysis import analyse
from memscale.simulation.dispatch.lazy_values import NeedsValues
from memscale.simulation.measured.empirical import measured_profile
from memscale.simulation.parallel.spec import ParallelKind
from memscale.simulation.process.garbage import few_collections
from memscale.simulation.record import check_plan, record, under
from memscale.simulation.results import Profile
from memscale.simulation.step import Target, TrainingStep, hardware_for
from memscale.simulation.trace import Trace


class MemoryProfiler:
    """A profiler of steps of one model with different batches.

    The step is simulated; operators without a rule for their shapes run on zeros. A step that reads values of a real
    run is measured: ``config.warmup_steps`` real steps and one more run, and all changes are undone.
    ``config.use_static_profiling`` and ``config.use_empirical_fallback`` turn either off.

    >>> import torch, memscale as ms
    >>> profiler = ms.MemoryProfiler(torch.nn.Linear(8, 8), loss=lambda y, _: y.sum())
    >>> small, large = (profiler.profile(torch.ones(rows, 8)).peak_bytes for rows in (10, 20))
    >>> large - small  # ten rows of input, and ten of an output and of the one before it
    960

    Args:
        model, optimizer, loss, plan, hardware, keeps_output, probe, parallel, world, shard, tensor: as in `profile`.
        config: the settings; None means ``Config()``.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss: Loss | None = None,
        plan: PlanLike | None = None,
        hardware: Hardware | str | None = None,
        config: Config | None = None,
        keeps_output: bool = True,
        probe: bool = False,
        parallel: ParallelKind | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        self.step = TrainingStep.of(
            model,
            optimizer,
            loss=loss,
            keeps_output=keeps_output,
            parallel=parallel,
            world=world,
            shard=shard,
            tensor=tensor,
        )
        check_config(config)
        self.config = config if config is not None else Config()
        self.plan = check_plan(self.step, plan)
        self.hardware = hardware_for(model, hardware)
        self.target = Target.of(self.hardware, probe=probe)

    def profile(self, batch: Any = None, *, accumulate: int = 1, capacity_bytes: int | None = None) -> Profile:
        """Returns the profile of a step with this batch; arguments and errors as in `memscale.profile`.

        `capacity_bytes` limits the memory of a simulated CUDA device below ``hardware.usable_bytes``: at the limit
        PyTorch's allocator returns cached memory before it fails.
        """
        return profile_of(self._on(batch, accumulate), self.plan, self.target, self.config, capacity_bytes)

    def simulated(self, batch: Any, *, accumulate: int = 1, updates: bool = True) -> Trace:
        """Returns the trace of the step, by simulation alone.

        Args:
            batch, accumulate: as in `profile`.
            updates: whether the optimizer steps; otherwise forward and backward are simulated alone, and gradients
                stay.

        Raises:
            ConfigError, NeedsValues, or an error of the model: the step cannot be simulated.
        """
        step = self._on(batch, accumulate)
        # A step without an optimizer keeps its gradients, too: dropped gradients would not be recognised as gradients.
        holds_gradients = not updates or (step.optimizer is None and step.module is not None)
        return record(step, self.plan, self.target, holds_gradients=holds_gradients)

    def _on(self, batch: Any, accumulate: int) -> TrainingStep:
        check_count(f"profile(accumulate={accumulate!r})", accumulate)
        loop = dataclasses.replace(self.step.loop, accumulate=accumulate)
        return dataclasses.replace(self.step, loop=loop).on(batch)


def profile_of(
    step: TrainingStep, plan: Plan, target: Target, config: Config, capacity_bytes: int | None = None
) -> Profile:
    """Returns the profile of a step under a plan: simulated, or measured on real steps where `config` allows that.

    Args:
        step: the step, with its batch.
        plan, target: as in `record`.
        config: see `MemoryProfiler`.
        capacity_bytes: see `MemoryProfiler.profile`.

    Raises:
        ConfigError: the step fails, or needs a real run that `config` forbids.
        RuntimeUnavailable: the step can be neither simulated nor run on this machine.
    """
    if not config.use_static_profiling:
        return _measured(step, plan, target, config, "Config(use_static_profiling=False)")
    try:
        with few_collections():  # also between the simulation and the analysis
            return analyse(record(step, plan, target), capacity_bytes, advises=True)
    except ConfigError:
        raise
    except NeedsValues as error:
        reason = str(error)
    except MemscaleError:
        raise
    except Exception as error:  # an error of the model, or of the simulation alone: a real step decides
        reason = f"{type(error).__name__}: {error}"
        if step.module is not None and any(parameter.is_meta for parameter in step.module.parameters()):
            numbers = any(each.is_meta and not each.is_floating_point() for each in tensors_of(step.batch))
            zeros = ": its numbers on meta are taken for zeros, which may be padding to it, so give real ones"
            raise ConfigError(
                f"the step fails: {reason}. Check that the batch is what the model is called with"
                f"{zeros if numbers else ''}; if it does run on a real device, build the model there"
            ) from error
    return _measured(step, plan, target, config, reason)


def _measured(step: TrainingStep, plan: Plan, target: Target, config: Config, reason: str) -> Profile:
    if not config.use_empirical_fallback:
        raise ConfigError(
            f"the step cannot be simulated: {reason}. Allow real steps with Config(use_empirical_fallback=True), "
            "or make the model's control flow independent of computed values"
        )
    with under(step, plan) as one:
        return measured_profile(one, config, target.hardware, reason)
