"""The search for recommendations: simulates changed steps, and keeps the changes that lower the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import MemscaleError
from memscale.hardware import narrow_dtype
from memscale.planning.engine import LEFT_FREE, DecisionEngine, allowed
from memscale.planning.extra_remedies import Setting, extra_remedies
from memscale.planning.prediction.predicted_step import PredictedStep
from memscale.planning.prediction.prediction import OOMPrediction, Recommendation
from memscale.planning.remedies import optimizer_options, other_loops, shorthands, split, summary
from memscale.planning.step_simulator import OutOfTime, limited, reason
from memscale.simulation import Parallel, Profile

# Share of the peak: a change that frees less is no recommendation. By choice.
_LEAST = 2e-3


def recommending(
    step: PredictedStep, prediction: OOMPrediction, batch: Any, seconds: float | None = None
) -> OOMPrediction:
    """Returns the prediction with recommendations, in descending order of freed bytes.

    Changes that take few simulations are tried first, and the search for a plan last. Interrupted from the keyboard, or
    after `seconds`, the prediction has the recommendations found until then, and a note that names the interruption.

    Args:
        step: the predicted step.
        prediction: the prediction of `step`, without recommendations.
        batch: the batch of the prediction.
        seconds: the time after which no simulation begins; None for no limit.
    """
    return _Remedies(step, prediction, batch, seconds).found()


class _Remedies:
    """The search for recommendations for one prediction."""

    def __init__(self, step: PredictedStep, prediction: OOMPrediction, batch: Any, seconds: float | None) -> None:
        self._prediction, self._batch = prediction, batch
        # Recommendations may take the whole of a caller's budget; of a whole device, `LEFT_FREE` stays free.
        whole = prediction.capacity_bytes == step.hardware.usable_bytes
        self._limit = prediction.capacity_bytes - int(LEFT_FREE * prediction.capacity_bytes if whole else 0)
        self._found: list[Recommendation] = []
        self._notes: list[str] = []
        self._now = ""
        self._step = dataclasses.replace(step, progress=limited(step.progress, seconds))

    def found(self) -> OOMPrediction:
        """Returns the prediction with the recommendations."""
        try:
            self._look()
        except (OutOfTime, KeyboardInterrupt) as end:
            self._notes.append(f"{reason(end)}, while simulating: {self._now}")
        # The planner's plan may equal the checkpointed blocks: one plan is recommended once.
        once = {(each.plan, each.peak_bytes): each for each in self._found}.values()
        best_first = sorted(once, key=lambda each: -each.freed_bytes)
        return dataclasses.replace(self._prediction, recommendations=tuple(best_first), notes=tuple(self._notes))

    def _look(self) -> None:
        step, model, capacity_bytes = self._step, self._model, self._prediction.capacity_bytes
        loops = other_loops(step.step.optimizer)
        if not step.plan and not self._prediction.fits and not self._is_measured:
            self._try("checkpointed blocks", self._checkpointed)
        # Another loop of the optimizer lowers only a peak in the optimizer phase.
        for options in loops if self._prediction.profile.moment.phase == "optimizer" else []:
            self._try(_loop(options), lambda: self._simulated(_loop(options), None, options))  # noqa: B023
        if casting := shorthands(model, step.hardware).get("cast", {}):
            own = [(rule.pattern, rule.transform) for rule in step.plan]
            if not any("cast" in repr(how) for _, how in own):
                whole = Plan([*own, *casting.items()])
                scaled = narrow_dtype(step.hardware) is torch.float16
                action = f"{summary(Plan(casting))}{', and scale the loss (LossScale)' if scaled else ''}"
                self._try("cast()", lambda: self._simulated(action, whole))
        in_parts = split(self._batch, 2) is not None
        if in_parts:
            self._try("accumulate gradients", lambda: self._in_parts(None))
        planned = self._try("a plan", self._planned)
        plan = None if planned is None else planned.plan
        if planned is None or planned.peak_bytes <= capacity_bytes:
            return
        if loops:
            both = f"{planned.action}, and {_loop(loops[0])}"
            self._try(both, lambda: self._simulated(both, plan, loops[0]), beyond=planned.freed_bytes)
        if in_parts:
            self._try("the plan and accumulated gradients", lambda: self._in_parts(plan))

    def _checkpointed(self) -> Recommendation | None:
        """Returns the checkpointed blocks as a recommendation, with remedies besides the plan until the step fits."""
        step, prediction = self._step, self._prediction
        rules = Plan(shorthands(self._model, step.hardware).get("checkpoint", {}))
        if not rules or "checkpoint" not in allowed(step.allowed).eligible():
            return None

        def simulate(plan: Plan, parallel: Parallel | None) -> Profile:
            step.next(summary(plan))
            return self._like(plan).among(parallel).profile(self._batch, prediction.capacity_bytes)

        own = Setting(rules, step.step.parallel)
        profile = simulate(rules, step.step.parallel)
        best: Recommendation | None = None
        try:
            for said, found in extra_remedies(own, profile, self._limit, simulate, step=step.step):
                action = summary(rules) + (f", with {' and '.join(map(str, said))}" if said else "")
                best = Recommendation(
                    action,
                    prediction.peak_bytes - found.taken_bytes,
                    found.taken_bytes,
                    plan=rules,
                    arguments=said,
                    step_seconds=found.step_seconds,
                )
        except (OutOfTime, KeyboardInterrupt):
            self._found += [best] if best is not None and best.freed_bytes > 0 else []
            raise
        return best

    def _try(self, what: str, make: Callable[[], Recommendation | None], beyond: int = 0) -> Recommendation | None:
        self._now = what
        try:
            better = make()
        except MemscaleError as error:
            self._notes.append(f"not simulated: {what}: {error}")
            return None
        if better is None or better.freed_bytes <= max(beyond, _LEAST * self._prediction.peak_bytes):
            return None
        self._found.append(better)
        return better

    def _planned(self) -> Recommendation | None:
        """Returns the planner's plan: the fastest that fits with the least risk, the smallest where none fits.

        A step that can only be measured cannot be planned: its recommendation is to checkpoint the repeated blocks.
        """
        step, model, prediction = self._step, self._model, self._prediction
        if self._is_measured:
            rule = Plan(shorthands(model, step.hardware).get("checkpoint", {}))
            return self._simulated(summary(rule), rule) if rule and not step.plan else None
        engine = DecisionEngine.of_step(
            step.step.on(self._batch),
            config=step.allowed,
            hardware=step.hardware,
            progress=lambda what, *_: step.next(what),
        )
        capacity_bytes = prediction.capacity_bytes
        limits = [self._limit, capacity_bytes * 85 // 100, prediction.peak_bytes * 3 // 4]
        plan = engine.nearest(max(1, next((each for each in limits if each < prediction.peak_bytes), limits[-1])))
        rejected = plan.evidence.rejected.items()
        self._notes += [f"not simulated: {candidate}: {reason}" for candidate, reason in rejected]
        if not plan:
            return None
        seconds = plan.evidence.planned.step_seconds if prediction.profile.step_seconds is not None else None
        peak_bytes = plan.evidence.planned.taken_bytes
        instead = " instead of yours" if step.plan else ""
        action = f"apply the plan{instead}: {summary(plan)}"
        return Recommendation(action, prediction.peak_bytes - peak_bytes, peak_bytes, plan=plan, step_seconds=seconds)

    def _simulated(self, action: str, plan: Plan | None, options: Mapping[str, bool] | None = None) -> Recommendation:
        self._step.next(action)
        prediction = self._prediction
        with optimizer_options(self._step.step.optimizer, options or {}):
            profile = self._like(plan).profile(self._batch, prediction.capacity_bytes)
        peak_bytes = profile.taken_bytes
        return Recommendation(
            action,
            prediction.peak_bytes - peak_bytes,
            peak_bytes,
            plan=plan,
            optimizer_options=options or {},
            step_seconds=profile.step_seconds,
        )

    def _in_parts(self, plan: Plan | None) -> Recommendation | None:
        """Returns the batch in 2, 4, 8, ... parts as a recommendation: the first that fits, or the smallest peak."""
        prediction = self._prediction
        # Two passes show the peak of any number of passes, since passes from the second on are alike. Two passes do not
        # show the time: such a recommendation has no `step_seconds`.
        like = self._like(plan).accumulating(2)
        best: Recommendation | None = None
        parts = 2
        while (part := split(self._batch, parts)) is not None:
            action = f"accumulate the gradients of {parts} equal parts of the batch"
            action += "" if plan is None else f", and apply the plan: {summary(plan)}"
            self._step.next(action)
            try:
                peak_bytes = like.profile(part, prediction.capacity_bytes).taken_bytes
            except MemscaleError:
                if best is None:
                    raise
                break  # BatchNorm, for example, refuses a batch of one row
            if best is not None and peak_bytes >= best.peak_bytes:
                break
            best = Recommendation(action, prediction.peak_bytes - peak_bytes, peak_bytes, plan=plan, parts=parts)
            if peak_bytes <= self._limit:
                break
            parts *= 2
        return best

    @property
    def _model(self) -> nn.Module:
        assert self._step.step.module is not None, "only modules are predicted"
        return self._step.step.module

    @property
    def _is_measured(self) -> bool:
        return self._prediction.profile.method == "empirical"

    def _like(self, plan: Plan | None) -> PredictedStep:
        """Returns the step under another plan, simulated or measured as the prediction was, for comparable figures."""
        config = dataclasses.replace(self._step.config, use_empirical_fallback=self._is_measured)
        return dataclasses.replace(self._step, plan=self._step.plan if plan is None else plan, config=config)


def _loop(options: Mapping[str, bool]) -> str:
    name, value = next(iter(options.items()))
    return f"build the optimizer with {name}={value}"
