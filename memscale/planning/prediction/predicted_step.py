"""`PredictedStep`: the training step of a prediction, with its plan, its device and its progress reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memscale.algebra import Plan
from memscale.config import Config
from memscale.hardware import Hardware
from memscale.planning.step_simulator import Progress
from memscale.simulation import Parallel, Profile, Target, TrainingStep, memory, profile_of, record_in_a_row


@dataclass
class PredictedStep:
    """A training step under a plan, for a device.

    Attributes:
        step: the training step, without its batch.
        plan: the transforms that the caller's step has already.
        config: how to profile; see `memscale.OOMPredictor`.
        allowed: the transforms that a recommended plan may use; None for every exact transform.
        target: the device of the prediction.
        progress: called before each simulation, see `Progress`; None for no reports.
        reported: the number of simulations of this prediction that were reported.
    """

    step: TrainingStep
    plan: Plan
    config: Config
    allowed: Config | None
    target: Target
    progress: Progress | None
    reported: int = 0

    @property
    def hardware(self) -> Hardware:
        """Returns the hardware of the prediction."""
        return self.target.hardware

    def profile(self, batch: Any, capacity_bytes: int | None = None) -> Profile:
        """Returns the profile of the step with `batch`; arguments and errors are those of `MemoryProfiler.profile`."""
        return profile_of(self.step.on(batch), self.plan, self.target, self.config, capacity_bytes)

    def reserved_over(self, batches: Sequence[Any], capacity_bytes: int | None = None) -> int | None:
        """Returns the most bytes that the caching allocator reserves over consecutive steps with `batches`.

        None means: the device has no caching allocator. Cached blocks of one batch may be of no use for a longer or
        shorter next batch, so that the steps may reserve more together than each alone.
        """
        steps = [self.step.on(batch) for batch in batches]
        return memory(record_in_a_row(steps, self.plan, self.target), capacity_bytes=capacity_bytes).reserved_peak_bytes

    def accumulating(self, passes: int) -> PredictedStep:
        """Returns the step with `passes` forward and backward passes for each step of the optimizer."""
        loop = dataclasses.replace(self.step.loop, accumulate=passes)
        return dataclasses.replace(self, step=dataclasses.replace(self.step, loop=loop))

    def among(self, parallel: Parallel | None) -> PredictedStep:
        """Returns the step as one process of `parallel`; None for a single process."""
        return dataclasses.replace(self, step=dataclasses.replace(self.step, parallel=parallel))

    def next(self, what: str, total: int | None = None) -> None:
        """Reports that the next simulation begins, and counts the report."""
        self.say(what, self.reported, total)
        self.reported += 1

    def say(self, what: str, done: int, total: int | None) -> None:
        """Reports a simulation of `what` to `progress`, with the numbers of simulations done and in total."""
        if self.progress is not None:
            self.progress(what, done, total)
