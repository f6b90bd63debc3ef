"""The steps of one model with one batch that planning simulates: counted, and told of before each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import ConfigError, Loss, MemscaleError, TransformError, matches
from memscale.hardware import Hardware
from memscale.planning.parts.candidates import Rules
from memscale.planning.parts.short_stack import shortened
from memscale.planning.speeds import timed
from memscale.simulation import MemoryProfiler, NeedsValues, Profile, Ranks, SimulatedStep, arguments_of

#: Called before each simulation with what it is about, how many are done, and how many there will be if that is known.
Progress = Callable[[str, int, int | None], None]


@dataclass
class StepSimulator:
    """Simulates steps.

    Attributes:
        model, batch, optimizer, loss, accumulate, keeps_output, hardware: of the step.
        ranks: whose it is, if it is asked about as one process's of several.
        is_distributed: whether the model is distributed already, so that there is no copy of it.
        progress: as `Progress`.
        count: how many were simulated.
    """

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None
    loss: Loss | None
    accumulate: int
    keeps_output: bool
    hardware: Hardware
    ranks: Ranks | None
    is_distributed: bool
    progress: Progress | None
    count: int = 0
    _kernels: Any = None

    def simulate(self, rules: Rules, updates: bool, left_out: frozenset[str] = frozenset()) -> SimulatedStep:
        """The step with these rules, with its update or without; of the model without the parts at these paths."""
        self.say("the step as it is" if not rules else "candidates" if not updates else "a plan")
        self.count += 1
        model, optimizer = self.model, self.optimizer
        if left_out:
            assert not updates, "the optimizer has the parameters of the whole model"
            if self.is_distributed:
                raise TransformError("a model that is distributed already is tried as a whole: no copy of it would be")
            model, optimizer = shortened(self.model, left_out), None
        profiler = self._profiler(Plan(rules), model, optimizer, self.ranks)
        return profiler.simulated(self.batch, accumulate=self.accumulate, updates=updates)

    def as_it_is(self) -> SimulatedStep:
        """The step without any rule, on hardware that has a speed for whatever it computes in, from then on.

        Raises:
            ConfigError: it fails, or cannot be simulated.
        """
        try:
            step = self.simulate((), True)
            # What autocast and the model's own casts compute in shows in a step only.
            if (speeds := timed(self.hardware, step.ledger.computes_in())) != self.hardware:
                self.hardware, self._kernels = speeds, None
                step = self.simulate((), True)
            return step
        except NeedsValues as error:
            raise ConfigError(
                f"this step cannot be planned: {error}. A plan rests on simulated steps, and this one reads values "
                "that only a real run computes; make the model's control flow independent of them, or write a plan by "
                "hand and measure it with profile(plan=...)"
            ) from error
        except MemscaleError:
            raise
        except NotImplementedError as error:
            raise ConfigError(
                f"this step cannot be planned: {error}. Plan the same model without what needs that (sparse=True of an "
                "embedding, say), or write a plan by hand and measure it with profile(plan=...)"
            ) from error
        except Exception as error:
            raise ConfigError(
                f"the step fails: {type(error).__name__}: {error}. Check that the batch is what the model is called "
                "with, and that the loss takes the output and this batch"
            ) from error

    def profile(self, plan: Plan, ranks: Ranks | None = None) -> Profile:
        """The profile of the step under a plan, as one process's of `ranks` if these are given."""
        profiler = self._profiler(plan, self.model, self.optimizer, self.ranks if ranks is None else ranks)
        return profiler.simulated(self.batch, accumulate=self.accumulate).profile()

    def inline(self, plan: Plan) -> Profile:
        """The profile of the step under a plan, in a loop that lets go of the model's output before backward."""
        self.say("the plan in a loop that keeps no output")
        self.count += 1
        return dataclasses.replace(self, keeps_output=False, progress=None).profile(plan)

    def other(self, plan: Plan, ranks: Ranks | None) -> Profile:
        """The same of what is no plan of the engine's, which counts."""
        self.say("another step")
        self.count += 1
        return self.profile(plan, ranks)

    def say(self, what: str) -> None:
        """Tell that a simulation begins."""
        if self.progress is not None:
            self.progress(what, self.count, None)

    def _profiler(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks | None
    ) -> MemoryProfiler:
        if ranks is not None and ranks.shard is not None and model is not self.model:
            there = [path for path, _ in model.named_modules()]
            kept = tuple(each for each in ranks.shard if any(matches(each, path) for path in there))
            ranks = dataclasses.replace(ranks, shard=kept)
        profiler = MemoryProfiler(
            model,
            optimizer,
            loss=self.loss,
            plan=plan if plan else None,
            hardware=self.hardware,
            keeps_output=self.keeps_output,
            **arguments_of(ranks),
        )
        # What steps have found of operators the next ones know.
        profiler.kernels = self._kernels = self._kernels or profiler.kernels
        return profiler
