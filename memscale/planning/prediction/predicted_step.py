"""The step that a prediction is about: what it is made of, and the simulations of it that are told of."""

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
    """A training step under a plan.

    Attributes:
        step: without its batch.
        plan: the transforms that it has already.
        config: see `memscale.OOMPredictor`.
        allowed: what a recommended plan may use; None for every exact transform.
        target: what it is predicted for.
        progress: as `Progress`.
        told: how many simulations of this prediction were told of.
    """

    step: TrainingStep
    plan: Plan
    config: Config
    allowed: Config | None
    target: Target
    progress: Progress | None
    told: int = 0

    @property
    def hardware(self) -> Hardware:
        """What it is predicted for."""
        return self.target.hardware

    def profile(self, batch: Any, capacity_bytes: int | None = None) -> Profile:
        """The profile of the step with this batch; arguments and errors as in `memscale.MemoryProfiler.profile`."""
        return profile_of(self.step.on(batch), self.plan, self.target, self.config, capacity_bytes)

    def reserved_over(self, batches: Sequence[Any], capacity_bytes: int | None = None) -> int | None:
        """Returns what the allocator reserves at its most over steps with these batches; None without an allocator.

        Blocks that one step leaves in the cache need not suit the next one, whose batch is longer or shorter.
        """
        steps = [self.step.on(batch) for batch in batches]
        return memory(record_in_a_row(steps, self.plan, self.target), capacity_bytes=capacity_bytes).reserved_peak_bytes

    def accumulating(self, passes: int) -> PredictedStep:
        """The same with so many passes for each step of the optimizer."""
        loop = dataclasses.replace(self.step.loop, accumulate=passes)
        return dataclasses.replace(self, step=dataclasses.replace(self.step, loop=loop))

    def among(self, parallel: Parallel | None) -> PredictedStep:
        """The same as one process's of these."""
        return dataclasses.replace(self, step=dataclasses.replace(self.step, parallel=parallel))

    def next(self, what: str, total: int | None = None) -> None:
        """Tell that the next simulation begins."""
        self.say(what, self.told, total)
        self.told += 1

    def say(self, what: str, done: int, total: int | None) -> None:
        """Tell of one."""
        if self.progress is not None:
            self.progress(what, done, total)
