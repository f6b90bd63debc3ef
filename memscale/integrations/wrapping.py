"""`Wrapping`: the part that the callbacks of all frameworks share, which wraps and detaches models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, PlanLike, as_plan
from memscale.config import Config, check_config
from memscale.core import Record
from memscale.legacy import Executor, wrapped
from memscale.planning import Budget
from memscale.simulation import Loop


class Wrapping:
    """Wraps one model at a time, until `end` or until the next model.

    Args:
        config, sample_input: as in `wrap`.
        plan: the plan to train under; `None` makes one.
        record, budget: as in `wrap`.
        loop: the framework's loop, for one pass in each update.

    Attributes:
        executor: the executor of the wrapped model; `None` without one.

    Raises:
        ConfigError: `config` is no `Config`.
        PlanError: `plan` is no plan.
    """

    def __init__(
        self,
        config: Config | None,
        plan: PlanLike | None,
        sample_input: Any,
        record: Record = None,
        budget: Budget | None = None,
        *,
        loop: Loop,
    ) -> None:
        check_config(config)
        self._given = {name: value for name, value in (("config", config), ("plan", plan)) if value is not None}
        self._config = config
        self._plan = None if plan is None else as_plan(plan)
        self._sample_input = sample_input
        self._record, self._budget, self._loop = record, budget, loop
        self.executor: Executor | None = None
        self.former_plan: str | None = None  # the plan of the run that is resumed, as JSON

    def wrap(self, model: nn.Module, accumulate: int) -> None:
        """Wraps `model`, unless it is wrapped already, for `accumulate` passes in each update."""
        loop = dataclasses.replace(self._loop, accumulate=accumulate)
        if self.executor is not None and Executor.of(model) is self.executor:
            self.executor.follow(loop)
        else:
            self.end()
            self.executor = wrapped(
                model,
                self._config,
                sample_input=self._sample_input,
                plan=self._plan,
                budget=self._budget,
                record=self._record,
                loop=loop,
            )

    def trained_by(self, optimizers: Sequence[Any]) -> None:
        """Makes plans for the optimizer that the framework is about to step, if there is one."""
        if self.executor is not None and len(optimizers) == 1 and isinstance(optimizers[0], torch.optim.Optimizer):
            self.executor.trained_by(optimizers[0])

    def after_step(self) -> None:
        """Reports once if a resumed run had another plan. Called after the first step, which makes the plan."""
        if self.former_plan is not None and self.executor is not None:
            former, self.former_plan = Plan.from_json(self.former_plan), None
            if former != self.executor.plan:
                self.executor.say(f"the run that is resumed had another plan:\n{former}")

    def end(self) -> None:
        """Detaches the wrapped model."""
        if self.executor is not None and self.executor.is_attached:
            self.executor.detach()
        self.executor = None

    @property
    def plan(self) -> str | None:
        """The present plan as JSON; `None` before there is one."""
        return None if self.executor is None else self.executor.plan.to_json()

    def __repr__(self) -> str:
        return f"MemScaleCallback({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"
