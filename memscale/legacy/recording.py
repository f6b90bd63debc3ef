"""What the history gets of a model that is wrapped: each step that was planned, and what it then took."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from memscale.config import Config
from memscale.hardware import Hardware
from memscale.history import Run, keep, keep_measured
from memscale.legacy.decision import Verdict, any_loss
from memscale.legacy.log import LOG
from memscale.simulation import MemoryProfiler


class Recording:
    """The history in which a wrapped model's steps are kept.

    Args:
        path: of its file.
        config: says whether and where to log.
    """

    def __init__(self, path: str, config: Config) -> None:
        self.path = path
        self.config = config

    def planned(
        self,
        verdict: Verdict,
        model: nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer | None,
        hardware: Hardware,
    ) -> Verdict:
        """The verdict with its run, which is kept; as it was where no step was simulated."""
        if verdict.profile is None:
            return verdict
        run: Run | None = None
        try:
            profile = verdict.profile
            trained = optimizer or torch.optim.AdamW(filter(lambda each: each.requires_grad, model.parameters()))
            if verdict.plan:  # the planner's evidence has its figures, and not what holds the memory
                profiler = MemoryProfiler(
                    model, trained, loss=any_loss, plan=verdict.plan, hardware=hardware, config=self.config
                )
                profile = profiler.profile(batch)
            plan, config = verdict.plan, self.config
            run = keep(profile, self.path, model, batch, plan=plan, optimizer=trained, config=config)
        except Exception as error:  # recording stops no run
            LOG.warning("this step is not recorded: %s: %s", type(error).__name__, error)
        return dataclasses.replace(verdict, run=run)

    def measured(self, run: Run, found: dict[str, float]) -> None:
        """Add what a real step took."""
        keep_measured(run, self.path, found)
