"""The step that a prediction is about: what it is made of, and the simulations of it that are told of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import Loss
from memscale.hardware import Hardware
from memscale.planning.step_simulator import Progress
from memscale.simulation import MemoryProfiler, Ranks, arguments_of


@dataclass
class PredictedStep:
    """A training step, without its batch.

    Attributes:
        model, optimizer, loss, plan, accumulate, keeps_output, config, probe, progress: as in `memscale.OOMPredictor`.
        allowed: what a recommended plan may use; None for every exact transform.
        hardware: what it is predicted for.
        ranks: whose it is, if it is asked about as one process's of several.
        told: how many simulations of this prediction were told of.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loss: Loss | None
    plan: Plan
    accumulate: int
    keeps_output: bool
    config: Config
    allowed: Config | None
    hardware: Hardware
    probe: bool
    ranks: Ranks | None
    progress: Progress | None
    told: int = 0

    def profiler(self, plan: Plan | None = None, config: Config | None = None) -> MemoryProfiler:
        """Of the step with this plan in the place of its own."""
        plan = self.plan if plan is None else plan
        return MemoryProfiler(
            self.model,
            self.optimizer,
            loss=self.loss,
            plan=plan if plan else None,
            hardware=self.hardware,
            config=self.config if config is None else config,
            keeps_output=self.keeps_output,
            probe=self.probe,
            **arguments_of(self.ranks),
        )

    def next(self, what: str, total: int | None = None) -> None:
        """Tell that the next simulation begins."""
        self.say(what, self.told, total)
        self.told += 1

    def say(self, what: str, done: int, total: int | None) -> None:
        """Tell of one."""
        if self.progress is not None:
            self.progress(what, done, total)
