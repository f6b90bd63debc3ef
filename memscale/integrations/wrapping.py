"""`Wrapping`: what the callbacks of all frameworks do to the model that is trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from memscale.algebra import Plan, PlanLike, as_plan
from memscale.config import Config, check_config
from memscale.core import Record
from memscale.legacy import Executor, attached, wrapped
from memscale.planning import Budget
from memscale.simulation import Loop


class Wrapping:
    """Wraps one model after the other, each until `end` or until the next.

    Args:
        config, sample_input: as in `wrap`.
        plan: to train under, instead of one that is planned.
        record, budget: as in `wrap`.
        loop: what the framework's loop does with the model's output.

    Attributes:
        executor: of the model that is wrapped; None while none is.

    Raises:
        ConfigError: `config` is no `Config`.
        PlanError: `plan` is none.
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
        self.former_plan: str | None = None  # JSON: of the run that is resumed

    def wrap(self, model: nn.Module) -> None:
        """Wrap `model`, unless that is done."""
        if self.executor is None or attached(model) is not self.executor:
            self.end()
            self.executor = wrapped(
                model,
                self._config,
                sample_input=self._sample_input,
                plan=self._plan,
                budget=self._budget,
                record=self._record,
                keeps_output=self._loop.keeps_output,
            )

    def after_step(self) -> None:
        """Say once if a run that is resumed had another plan: by now the first call has planned."""
        if self.former_plan is not None and self.executor is not None:
            former, self.former_plan = Plan.from_json(self.former_plan), None
            if former != self.executor.plan:
                self.executor.say(f"the run that is resumed had another plan:\n{former}")

    def end(self) -> None:
        """Detach what is wrapped."""
        if self.executor is not None and self.executor.is_attached:
            self.executor.detach()
        self.executor = None

    @property
    def plan(self) -> str | None:
        """The plan that holds, as JSON."""
        return None if self.executor is None else self.executor.plan.to_json()

    def __repr__(self) -> str:
        return f"MemScaleCallback({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"
