"""The steps of one model with one batch that planning simulates: counted, and told of before each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from memscale.algebra import Plan
from memscale.core import ConfigError, MemscaleError, TransformError
from memscale.hardware import Hardware
from memscale.planning.parts.candidates import Rules
from memscale.planning.parts.short_stack import shortened
from memscale.planning.speeds import timed
from memscale.simulation import NeedsValues, Parallel, Profile, Target, Trace, TrainingStep, analyse, record

#: Called before each simulation with what it is about, how many are done, and how many there will be if that is known.
Progress = Callable[[str, int, int | None], None]


class OutOfTime(BaseException):
    """A simulation would begin after the last second; like KeyboardInterrupt it is no error of a model's."""


def reason(end: BaseException) -> str:
    """Why a search ended before it was done: an `OutOfTime`, or the keyboard."""
    return str(end) or "interrupted"


def limited(progress: Progress | None, seconds: float | None) -> Progress | None:
    """`progress` that raises `OutOfTime`, once, before the first simulation after so many seconds; None is no limit.

    >>> say = limited(print, 0.0)
    >>> try:
    ...     say("a plan", 1, None)
    ... except OutOfTime:
    ...     say("what is told at the end", 1, None)
    what is told at the end 1 None
    """
    if seconds is None:
        return progress
    until: float | None = time.monotonic() + seconds

    def say(what: str, done: int, total: int | None) -> None:
        nonlocal until
        if until is not None and time.monotonic() >= until:
            until = None
            raise OutOfTime(f"stopped after {seconds:g} s (allow more seconds)")
        if progress is not None:
            progress(what, done, total)

    return say


@dataclass
class StepSimulator:
    """Simulates steps.

    Attributes:
        step: the step that plans are made for.
        target: the device.
        progress: as `Progress`.
        count: how many were simulated.
    """

    step: TrainingStep
    target: Target
    progress: Progress | None
    count: int = 0

    @property
    def hardware(self) -> Hardware:
        """The device as steps are simulated for it."""
        return self.target.hardware

    def simulate(self, rules: Rules, updates: bool, left_out: frozenset[str] = frozenset()) -> Trace:
        """The step with these rules, with its update or without; of the model without the parts at these paths."""
        self.say("the step as it is" if not rules else "candidates" if not updates else "a plan")
        self.count += 1
        step = self.step
        if left_out:
            assert not updates, "the optimizer has the parameters of the whole model"
            assert step.module is not None, "a function is not planned"
            if step.is_distributed:
                raise TransformError("a model that is distributed already is tried as a whole: no copy of it would be")
            model = shortened(step.module, left_out)
            spec = None if step.parallel is None else step.parallel.among(model)
            step = dataclasses.replace(step, model=model, optimizer=None, parallel=spec)
        return self._recorded(step, Plan(rules), updates)

    def as_it_is(self) -> Trace:
        """The step without any rule, on hardware that has a speed for whatever it computes in, from then on.

        Raises:
            ConfigError: it fails, or cannot be simulated.
        """
        try:
            step = self.simulate((), True)
            # What autocast and the model's own casts compute in shows in a step only.
            if (speeds := timed(self.hardware, step.computes_in())) != self.hardware:
                self.target = Target.of(speeds)
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

    def profile(self, plan: Plan, parallel: Parallel | None = None) -> Profile:
        """The profile of the step under a plan, as one process's of `parallel` if that is given."""
        step = self.step if parallel is None else dataclasses.replace(self.step, parallel=parallel)
        return analyse(self._recorded(step, plan))

    def inline(self, plan: Plan) -> Profile:
        """The profile of the step under a plan, in a loop that lets go of the model's output before backward."""
        self.say("the plan in a loop that keeps no output")
        self.count += 1
        loop = dataclasses.replace(self.step.loop, keeps_output=False)
        return analyse(self._recorded(dataclasses.replace(self.step, loop=loop), plan))

    def other(self, plan: Plan, parallel: Parallel | None) -> Profile:
        """The same of what is no plan of the engine's, which counts."""
        self.say("another step")
        self.count += 1
        return self.profile(plan, parallel)

    def say(self, what: str) -> None:
        """Tell that a simulation begins."""
        if self.progress is not None:
            self.progress(what, self.count, None)

    def _recorded(self, step: TrainingStep, plan: Plan, updates: bool = True) -> Trace:
        # Without an optimizer there is no update, either: a step that drops its gradients would hide what they are.
        return record(step, plan, self.target, holds_gradients=not updates or step.optimizer is None)
