"""`SizeSearch`: the search for the best size of a batch.

The search evaluates a size in three ways, from cheap to expensive:

    the step under another size's plan             one simulation
    the step without a plan                        one simulation and a decision engine
    the step under the fastest plan for the size   a search for that plan
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from memscale.algebra import Plan, Transform
from memscale.config import Config
from memscale.core import BudgetError, ConfigError, PlanError, TransformError, batches
from memscale.hardware import Hardware
from memscale.planning.engine import DecisionEngine
from memscale.planning.evidence.curve import Point
from memscale.planning.evidence.evidence import Figures
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.prediction.largest import MOST_SIMULATIONS, largest_fitting
from memscale.planning.prediction.sizes import BatchFn, Sizes
from memscale.planning.step_simulator import OutOfTime, reason
from memscale.planning.tuning.rates import Pace, fastest_size
from memscale.planning.tuning.tuning import SizeTrial, Tuning
from memscale.simulation import Profile, Target, TrainingStep, analyse, record

# The most sizes to plan for between the smallest and the largest size: benchmarks/bench_answers.py.
_MOST_PLANS = 12
# The most rounds of the search for the largest size; each round before the last finds a plan for a larger size:
# benchmarks/bench_answers.py.
_ROUNDS = 6

Count = Callable[[Any], int]


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The step that is tuned, without its batch; see `AutoTuner`."""

    step: TrainingStep
    config: Config | None
    hardware: Hardware
    stepping: Collection[str | Transform]


@dataclass(eq=False)
class SizeSearch:
    """A search for the best size, with the results of its simulations.

    Attributes:
        own: the step that is tuned.
        report: called before each simulation with its subject and the number of simulations done.
        batch_fn, objective, at_least, at_most, count: as in `AutoTuner.tune`.
        limit: bytes that a step may take.
        plans: by size, the best plan found.
        plain: by size, the figures of the step without a plan.
        trials: the sizes that were simulated.
        too_large: by size that does not fit, the bytes of the smallest plan found.
        notes: the assumptions that the result rests on, as keys.
        simulations: the number of simulated steps.
    """

    own: ModelStep
    report: Callable[[str, int], None]
    batch_fn: BatchFn
    objective: str
    limit: int
    at_least: int
    at_most: int
    count: Count | None
    plans: dict[int, ProvenPlan] = field(default_factory=dict, init=False)
    plain: dict[int, Figures] = field(default_factory=dict, init=False)
    trials: dict[int, SizeTrial] = field(default_factory=dict, init=False)
    too_large: dict[int, int] = field(default_factory=dict, init=False)
    notes: dict[str, None] = field(default_factory=dict, init=False)
    simulations: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.unit = "counted" if self.count is not None else "tokens" if self.objective == "sequence" else "samples"
        self.sizes = Sizes(self.batch_fn, self.at_least, "tune")
        self.counts: dict[int, int] = {}
        self._fastest_known: set[int] = set()
        self._under: dict[tuple[Plan, int], int] = {}
        self._others: dict[int, tuple[ProvenPlan, Profile]] = {}  # size -> the plan of another size under which it fits
        self._hardware = self.own.hardware
        self._batch: tuple[int, Any] | None = None

    def best(self) -> Tuning:
        """Returns the best size found, with its plan.

        Raises:
            BudgetError, ConfigError: as in `AutoTuner.tune`.
        """
        bound, interrupted, complete = None, False, True
        try:
            if self.objective == "throughput":
                size, bound = self._fastest()
            else:
                size = self._largest(self.at_least)
                self._planned(size)
            self._hand_down()
            size = max(self.plans, key=lambda each: (self._value(each), -each))
            if size > self.at_least and self.sizes.only_values_differ(size):
                taken = self.trials[size].taken_bytes, self.trials[self.at_least].taken_bytes
                if taken[0] == taken[1]:
                    raise ConfigError(
                        f"batch_fn does not scale: the step takes {taken[0]} bytes with batch_fn({self.at_least}) as "
                        f"with batch_fn({size}), of tensors of the same shapes; return a batch that grows with its size"
                    )
        except (KeyboardInterrupt, OutOfTime) as end:
            interrupted, complete = isinstance(end, KeyboardInterrupt), False
            self.notes[f"{reason(end)}: other sizes may do better"] = None
            size = self._best_so_far(end)
        return Tuning(
            objective=self.objective,
            size=size,
            plan=self.plans[size],
            per_second=self._rate(size),
            bound_per_second=bound,
            unit=self.unit,
            budget_bytes=self.limit,
            trials=tuple(self.trials[each] for each in sorted(self.trials)),
            too_large=min((each for each in self.too_large if each > size), default=None),
            simulations=self.simulations,
            notes=(*self.notes, *(note for note in self.plans[size].evidence.notes if "relative" in note)),
            interrupted=interrupted,
            complete=complete,
        )

    def _best_so_far(self, end: BaseException) -> int:
        """Returns the best size that is known to fit, after `end` has stopped the search.

        Raises:
            BudgetError: the time limit has passed, and no plan tried for the smallest size fits.
            KeyboardInterrupt: the user interrupted the search before any size was found to fit, or interrupts again.
        """
        if self.objective != "throughput" and self._others and max(self._others) > max(self.plans, default=0):
            self._adopted(max(self._others))
        if not self.plans and isinstance(end, OutOfTime):
            self._planned(self.at_least, end)
        if not self.plans:
            raise KeyboardInterrupt
        return max(self.plans, key=self._value)

    def _value(self, size: int) -> float:
        """Returns the objective's value of a size that fits: its rate, or the size itself."""
        return self._rate(size) if self.objective == "throughput" else size

    # -- the size with the highest rate --------------------------------------------------------------------------------

    def _fastest(self) -> tuple[int, float | None]:
        """Returns the size with the highest rate, and an upper bound of all sizes' rates; None if none is known."""
        self._planned(self.at_least)  # raises if no size fits
        ends = {self.at_least, *self._as_it_is_ends()}
        known = {size: self._pace(size) for size in sorted(ends)}
        if max(ends) < self.at_most and self._beyond(known) > max(each.rate for each in known.values()):
            largest = self._largest(max(ends))
            known[largest] = self._pace(largest)
        found, bound = fastest_size(self._pace, known, most=_MOST_PLANS)
        if bound is None:
            uneven = "the time of a step grows unevenly with its size: sizes between the sizes shown may be faster"
            self.notes[uneven] = None
        elif max(found) < self.at_most and not self.too_large:
            bound = max(bound, self._beyond(found))
        return max(found, key=lambda size: (found[size].rate, -size)), bound

    def _as_it_is_ends(self) -> list[int]:
        """Returns the simulated sizes whose step fits without a plan, ascending."""
        n, taken = largest_fitting(
            self._plain_bytes, self.limit, at_least=self.at_least, at_most=self.at_most, most=MOST_SIMULATIONS
        )
        return [] if n is None else sorted(size for size, nbytes in taken.items() if nbytes <= self.limit)

    def _beyond(self, known: dict[int, Pace]) -> float:
        """Returns an upper bound of the rate at `at_most`: that without a plan, on a line through two known sizes."""
        last = max(known)
        if not any(size != last for size in self.plain):
            self._engine(min(2 * last, self.at_most))
        other = min((size for size in self.plain if size != last), key=lambda size: abs(size - last))
        counted = (self.counts[other] - self.counts[last]) / (other - last)
        seconds = (self.plain[other].step_seconds - self.plain[last].step_seconds) / (other - last)
        most = self.at_most - last
        beyond = self.plain[last].step_seconds + most * seconds
        return (self.counts[last] + most * counted) * self.own.step.loop.accumulate / beyond if beyond > 0 else math.inf

    def _pace(self, size: int) -> Pace:
        try:
            seconds = self._planned(size).evidence.planned.step_seconds
        except BudgetError:
            if size == self.at_least:
                raise
            seconds = math.inf
        return Pace(self.counts[size] * self.own.step.loop.accumulate, self.plain[size].step_seconds, seconds)

    def _rate(self, size: int) -> float:
        seconds = self.plans[size].evidence.planned.step_seconds
        return self.counts[size] * self.own.step.loop.accumulate / seconds if seconds else 0.0

    # -- the largest size that fits ------------------------------------------------------------------------------------

    def _largest(self, low: int) -> int:
        """Returns the largest size, from `low` on, whose step fits under some plan.

        A round tries the smallest plan of one size on larger sizes, at one simulation each, and finds the largest n
        that fits under this plan. The planner then searches for the smallest plan for ``n + 1``. If ``n + 1`` fits
        under this new plan, the next round tries the new plan on larger sizes.
        """
        plan = self._smallest(low) or self._planned(low)  # `_planned` raises the error with remedies
        for _ in range(_ROUNDS):
            taken = functools.partial(self._under_bytes, plan)
            found, _ = largest_fitting(taken, self.limit, at_least=low, at_most=self.at_most, most=MOST_SIMULATIONS)
            low = low if found is None else found
            if low == self.at_most:
                return low
            if (better := self._smallest(low + 1)) is None:
                return low
            low, plan = low + 1, better
        self.notes[f"size {low} fits; size {low + 1} was not tried"] = None
        return low

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _smallest(self, size: int) -> ProvenPlan | None:
        """Returns the plan with the smallest peak for a size; None if that peak is above the limit."""
        if (nbytes := self.sizes.least_bytes(size)) > self.limit:
            self._too_large(size, nbytes)
            return None
        engine = self._engine(size)
        self._as_it_is(size, engine)  # before the search, so that an interrupted search has this result
        before = engine.simulations
        plan = engine.smallest()
        self.simulations += engine.simulations - before
        taken = plan.evidence.planned.taken_bytes
        if taken > self.limit:
            self._too_large(size, taken)
            return None
        self._fits(size, plan)
        return plan

    def _planned(self, size: int, stopped: BaseException | None = None) -> ProvenPlan:
        """Returns the fastest plan that fits; if the search was `stopped`, a plan found with few simulations.

        Raises:
            BudgetError: no plan fits.
        """
        if size in self._fastest_known:
            return self.plans[size]
        if size in self.too_large and size != self.at_least:  # the smallest size's error has remedies: search again
            raise BudgetError(f"size {size} does not fit")
        engine = self._engine(size)
        before = engine.simulations
        try:
            if stopped is not None and engine.plain.taken_bytes > self.limit:
                plan = engine.so_far(self.limit, stopped)
            else:
                plan = engine.fastest(self.limit, with_remedies=size == self.at_least)
        except BudgetError as error:
            if size in self._others:
                return self._adopted(size)
            self._too_large(size, error.peak_bytes or 0)
            if size != self.at_least:
                raise
            fault = BudgetError(f"not even batch_fn({size}) fits: {error}").naming(*error.arguments)
            fault.peak_bytes, fault.plan = error.peak_bytes, error.plan
            raise fault from error
        finally:
            self.simulations += engine.simulations - before
        self._fits(size, plan)
        self._fastest_known.add(size)
        return plan

    def _hand_down(self) -> None:
        """Gives each size the plan of the next larger size if the step fits and is faster under that plan."""
        for larger, size in itertools.pairwise(sorted(self.plans, reverse=True)):
            plan, seconds = self.plans[larger], self.plans[size].evidence.planned.step_seconds
            if plan.evidence.planned.step_seconds < seconds and self._under_bytes(plan, size) <= self.limit:
                other, profile = self._others[size]
                if other is plan and (profile.step_seconds or 0.0) < seconds:
                    self._fastest_known.discard(size)
                    self._adopted(size)

    def _adopted(self, size: int) -> ProvenPlan:
        """Returns another size's plan under which `size` fits, with evidence for `size`."""
        other, profile = self._others[size]
        if size not in self.plain:
            self._engine(size, quiet=True)
        evidence = dataclasses.replace(
            other.evidence,
            budget_bytes=self.limit,
            planned=Figures.of(profile),
            plain=self.plain[size],
            bound_seconds=self.plain[size].step_seconds,
            by_tier=profile.by_tier,
            trace=(f"adopted: a plan that was made for another size, under which size {size} fits",),
            decisions=(),
        )
        plan = ProvenPlan(other, evidence)
        self._fits(size, plan)
        self._fastest_known.add(size)
        return plan

    def _as_it_is(self, size: int, engine: DecisionEngine) -> None:
        """Records the step without a plan as the fastest if the step fits as it is."""
        if engine.plain.taken_bytes <= self.limit:
            self._fits(size, engine.plan(self.limit))
            self._fastest_known.add(size)

    def _fits(self, size: int, plan: ProvenPlan) -> None:
        if size in self._fastest_known:
            return
        figures = plan.evidence.planned
        self.plans[size] = plan
        self.too_large.pop(size, None)
        self.trials[size] = SizeTrial(
            size, figures.taken_bytes, True, figures.step_seconds, self._rate(size), Point.of(plan).summary
        )

    def _too_large(self, size: int, nbytes: int) -> None:
        self.too_large[size] = nbytes
        self.trials[size] = SizeTrial(size, nbytes, False, 0.0, 0.0, "")

    def _plain_bytes(self, size: int) -> int:
        if (nbytes := self.sizes.least_bytes(size)) > self.limit:
            return nbytes
        if size not in self.plain:
            engine = self._engine(size)
            self._as_it_is(size, engine)
        return self.plain[size].taken_bytes

    def _under_bytes(self, plan: ProvenPlan, size: int) -> int:
        """Returns the bytes of a step under another size's plan; more than the limit if the plan cannot be applied."""
        if (nbytes := self.sizes.least_bytes(size)) > self.limit:
            return nbytes
        if (plan, size) not in self._under:
            self._say(size, "the plan of another size")
            try:
                step = self.own.step.on(self._made(size))
                profile = analyse(record(step, plan, Target.of(self._hardware)))
                nbytes = profile.taken_bytes
                if nbytes <= self.limit:
                    self._others[size] = (plan, profile)
            except (PlanError, TransformError):
                nbytes = 2 * self.limit + 1
            except Exception as error:  # the model's own code may raise any error at a size of its own
                raise self._fault(size, str(error)) from error
            self.simulations += 1
            self._under[plan, size] = nbytes
        return self._under[plan, size]

    def _engine(self, size: int, *, quiet: bool = False) -> DecisionEngine:
        """Returns a new engine for a size, after the engine has simulated the step without a plan."""
        own = self.own
        batch = self._made(size)
        try:
            engine = DecisionEngine.of_step(
                own.step.on(batch),
                config=own.config,
                stepping=own.stepping,
                hardware=own.hardware,
                progress=None if quiet else lambda what, *_: self._say(size, what),
            )
        except ConfigError as error:
            if size == self.at_least:
                raise
            raise self._fault(size, str(error)) from error
        self._hardware = engine.hardware  # with nominal rates in place of unknown rates
        self.simulations += engine.simulations
        self.plain[size] = Figures.of(engine.plain)
        return engine

    def _made(self, size: int) -> Any:
        if self._batch is None or self._batch[0] != size:
            self._batch = (size, self.sizes.batch(size))
            self.counts[size] = self._counted(self._batch[1], size)
        return self._batch[1]

    def _counted(self, batch: Any, size: int) -> int:
        if self.count is None:
            return size if self.unit == "samples" else _tokens(batch, size)
        number = self.count(batch)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"count(batch_fn({size})) must be an int of at least 1, got {number!r}")
        return number

    def _fault(self, size: int, what: str) -> ConfigError:
        return self.sizes.fault(size, f"the step does not run with batch_fn({size}): {what};")

    def _say(self, size: int, what: str) -> None:
        best = f", so far size {max(self.plans, key=self._value)}" if self.plans else ""
        self.report(f"size {size}: {what}{best}", self.simulations)


def _tokens(batch: Any, size: int) -> int:
    """Returns the number of elements of the batch's first integer tensor; `size` for a batch without one."""
    for leaf in batches.tensors(batch):
        if leaf.dim() and leaf.dtype != torch.bool and not leaf.is_floating_point() and not leaf.is_complex():
            return leaf.numel()
    return size
