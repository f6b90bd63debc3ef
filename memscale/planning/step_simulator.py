"""`StepSimulator`: simulates steps of one model with one batch, counts the simulations and reports progress."""

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

#: Called before each simulation with its subject, the number of simulations done, and the total (None if unknown).
Progress = Callable[[str, int, int | None], None]


class OutOfTime(BaseException):
    """Signals that the time limit of a search is over.

    A BaseException, as KeyboardInterrupt is: ``except Exception`` around the model's own code lets the signal through.
    """


def reason(end: BaseException) -> str:
    """Returns why a search ended early, as text: the message of an `OutOfTime`, or "interrupted" for the keyboard."""
    return str(end) or "interrupted"


def limited(progress: Progress | None, seconds: float | None) -> Progress | None:
    """Returns `progress` with a time limit: the first call after `seconds` raises `OutOfTime`, later calls do not.

    ``seconds=None`` means: no limit.

    >>> say = limited(print, 0.0)
    >>> try:
    ...     say("a plan", 1, None)
    ... except OutOfTime:
    ...     say("the result", 1, None)
    the result 1 None

    Raises:
        ConfigError: `seconds` is negative.
    """
    if seconds is None:
        return progress
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ConfigError(f"seconds must be at least 0, got {seconds!r}; leave it out for a search without a limit")
    until: float | None = time.monotonic() + seconds

    def say(what: str, done: int, total: int | None) -> None:
        nonlocal until
        if until is not None and time.monotonic() >= until:
            until = None
            raise OutOfTime(f"stopped after {seconds:g} s (seconds= or --seconds allows more)")
        if progress is not None:
            progress(what, done, total)

    return say


@dataclass
class StepSimulator:
    """The simulator of one training step under any plan.

    Attributes:
        step: the step that plans are made for.
        target: the device.
        progress: called before each simulation, see `Progress`; None for no reports.
        count: the number of simulations so far.
    """

    step: TrainingStep
    target: Target
    progress: Progress | None
    count: int = 0

    @property
    def hardware(self) -> Hardware:
        """Returns the hardware of `target`, which has nominal rates in place of unknown rates after `as_it_is`."""
        return self.target.hardware

    def simulate(self, rules: Rules, updates: bool, left_out: frozenset[str] = frozenset()) -> Trace:
        """Returns the trace of the step with `rules`.

        Args:
            rules: the rules of the plan; empty for the step as written.
            updates: whether the optimizer steps.
            left_out: paths of parts that are removed from the model first; requires ``updates=False``.

        Raises:
            TransformError: parts are to be left out of a model that is distributed already.
        """
        self.say("the step as written" if not rules else "trials of candidates" if not updates else "a plan")
        self.count += 1
        step = self.step
        if left_out:
            assert not updates, "the optimizer has the parameters of the whole model"
            assert step.module is not None, "a function is not planned"
            if step.is_distributed:
                raise TransformError("a distributed model is tried as a whole: a copy would not be distributed")
            model = shortened(step.module, left_out)
            spec = None if step.parallel is None else step.parallel.among(model)
            step = dataclasses.replace(step, model=model, optimizer=None, parallel=spec)
        return self._recorded(step, Plan(rules), updates)

    def as_it_is(self) -> Trace:
        """Returns the trace of the step without a rule, after giving `target` a rate for each dtype of the step.

        Raises:
            ConfigError: the step fails, or cannot be simulated.
        """
        try:
            step = self.simulate((), True)
            # The dtypes of autocast and of casts inside the model are known only after a simulated step.
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
        except Exception as error:  # the caller's model and loss may raise any error
            raise ConfigError(
                f"the step fails: {type(error).__name__}: {error}. Check that the batch is what the model is called "
                "with, and that the loss takes the output and this batch"
            ) from error

    def profile(self, plan: Plan, parallel: Parallel | None = None) -> Profile:
        """Returns the profile of the step under a plan, as one process of `parallel` (None: the step's own spec)."""
        step = self.step if parallel is None else dataclasses.replace(self.step, parallel=parallel)
        return analyse(self._recorded(step, plan))

    def other(self, plan: Plan, parallel: Parallel | None) -> Profile:
        """Returns the profile of a step outside the engine's search; the simulation is counted and reported."""
        self.say("a remedy")
        self.count += 1
        return self.profile(plan, parallel)

    def say(self, what: str) -> None:
        """Reports to `progress` that a simulation of `what` begins."""
        if self.progress is not None:
            self.progress(what, self.count, None)

    def _recorded(self, step: TrainingStep, plan: Plan, updates: bool = True) -> Trace:
        # Without an update the gradients are held to the end of the step: a step that drops its gradients early would
        # show a smaller peak than training has.
        try:
            return record(step, plan, self.target, holds_gradients=not updates or step.optimizer is None)
        except MemscaleError:
            raise
        except Exception as error:  # the model's own code may raise any error under a transform, or without its parts
            if not plan and step is self.step:
                raise
            raise TransformError(f"{type(error).__name__}: {error}") from error
