"""`DecisionEngine`: finds the fastest composition of transforms that fits a budget, and proves it by simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, Transform, chain, is_transformed
from memscale.config import Config, check_config
from memscale.core import ConfigError, Loss, budget_bytes, check_count, check_switch, format_unlike
from memscale.hardware import Hardware
from memscale.planning.evidence.curve import Frontier, Point
from memscale.planning.evidence.decisions import decisions_of, rejected_of, trace_of
from memscale.planning.evidence.evidence import Decision, Evidence, Figures
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.extra_remedies import lighter_update
from memscale.planning.fingerprint import fingerprint, planner
from memscale.planning.gains import kept_output, logits_of_head
from memscale.planning.parts.globs import with_globs
from memscale.planning.plan_cache import Answer, PlanCache, Proofs
from memscale.planning.refusal import Refusal
from memscale.planning.search.found import Found, Proven
from memscale.planning.search.search import leaves_margin
from memscale.planning.search.searches import Searches, check_link
from memscale.planning.speeds import dtypes_of, timed
from memscale.planning.step_simulator import OutOfTime, Progress, StepSimulator, limited, reason
from memscale.planning.stepping import checked
from memscale.policy import StrategyContext, StrategyDecision, everything, select, widenings
from memscale.simulation import Parallel, ParallelKind, Profile, Target, TrainingStep, analyse, hardware_for
from memscale.transforms import proven_rows

Budget = int | float | str
# Points of a frontier by default; its seconds grow with them: benchmarks/bench_answers.py.
POINTS = 12

#: The share of a device that recommendations and `AutoTuner` leave free without a budget, for other processes, and for
#: memory of libraries that PyTorch does not count. Assumed.
LEFT_FREE = 0.05

#: The note of a plan whose search was stopped, and the note of a plan whose search was interrupted from the keyboard.
SO_FAR = "the fastest of the plans that were simulated until then; a faster one may fit"
INTERRUPTED_SEARCH = f"{reason(KeyboardInterrupt())}: {SO_FAR}"

_ROUNDS_NOTHING = "rounding is allowed, and the fastest plan needs none: its results are equal bit for bit"

# Multiple of the lower bound of all plans' seconds up to which a plan of the policy's techniques is accepted; more
# steps are simulated with less: benchmarks/bench_simulate.py --plan.
_NEAR = 1.02


def allowed(config: Config | None, *, exact: bool = True) -> Config:
    """Returns the config that says which transforms a plan may use; without `config`, all that change no bit.

    Args:
        config: the caller's config; None allows every exact transform.
        exact: False allows `tile`, whose sums are in another order, unless `config` sets ``enable_tiling`` itself.

    >>> sorted(allowed(None).eligible()), sorted(allowed(None, exact=False).eligible())
    (['checkpoint', 'offload'], ['checkpoint', 'offload', 'tile'])
    """
    check_switch(f"plan(exact={exact!r})", exact)
    if config is None:
        return Config(mode="aggressive", enable_tiling=not exact)
    if exact or "enable_tiling" in config.given:
        return config
    return dataclasses.replace(config, enable_tiling=True)


class DecisionEngine:
    """A planner of one model with one batch, for any number of budgets; arguments and errors as in `memscale.plan`.

    The costs of the candidates are found once, for the first budget that the step as written does not fit. With
    ``streams=False`` no plan moves parameters off the device.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    >>> step = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu"}
    >>> engine = ms.DecisionEngine(nn.Sequential(*blocks), torch.ones(1024, 64), **step)
    >>> [len(engine.plan(budget)) for budget in ("16MiB", "8MiB", "7MiB")]
    [0, 1, 1]
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss | None = None,
        config: Config | None = None,
        hardware: Hardware | str | None = None,
        accumulate: int = 1,
        keeps_output: bool = True,
        stepping: Collection[str | Transform] = (),
        progress: Progress | None = None,
        streams: bool = True,
        parallel: ParallelKind | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        check_model(model, "plan")
        step = TrainingStep.of(
            model,
            optimizer,
            loss=loss,
            accumulate=accumulate,
            keeps_output=keeps_output,
            parallel=parallel,
            world=world,
            shard=shard,
            tensor=tensor,
            caller="plan",
        )
        self._begin(step.on(batch), config, hardware, stepping, progress, streams)

    @classmethod
    def of_step(
        cls,
        step: TrainingStep,
        *,
        config: Config | None = None,
        hardware: Hardware | str | None = None,
        stepping: Collection[str | Transform] = (),
        progress: Progress | None = None,
        streams: bool = True,
    ) -> DecisionEngine:
        """Returns the engine for a training step with its batch."""
        check_model(step.model, "plan")
        engine = cls.__new__(cls)
        engine._begin(step, config, hardware, stepping, progress, streams)
        return engine

    def _begin(
        self,
        step: TrainingStep,
        config: Config | None,
        hardware: Hardware | str | None,
        stepping: Collection[str | Transform],
        progress: Progress | None,
        streams: bool,
    ) -> None:
        check_config(config)
        assert step.module is not None, "a function is not planned"
        self.step = step
        self.model = step.module
        self.config = allowed(config)
        self.made_for = step.parallel or Parallel.of_distributed(step.model)
        # FSDP2 and DDP manage the parameters: a plan must not stream them.
        self.streams = streams and self.made_for is None
        self.stepping = dict.fromkeys(self.config.eligible() & {"quantize_states"}) | checked(stepping)
        requested = hardware_for(step.model, hardware)
        self.steps = StepSimulator(step, Target.of(timed(requested, dtypes_of(self.model))), progress)
        self.plain_step = self.steps.as_it_is()
        self.hardware = self.steps.hardware
        self.searches = Searches(self.steps, self.plain_step, self.config, self.stepping, streams=self.streams)
        self._nominal = self.hardware != requested
        self.plain = analyse(self.plain_step)
        self._plan_cache = PlanCache()

    def plan(self, budget: Budget, *, with_remedies: bool = True, seconds: float | None = None) -> ProvenPlan:
        """Returns the fastest plan whose step takes at most `budget`, as in `memscale.plan`.

        Interrupted from the keyboard, or after `seconds`, the result is the fastest plan that was simulated and fits,
        with a note that names the interruption.

        Args:
            budget: the most that the step may take: bytes as an int, ``"6GiB"`` or ``"6GB"``, or a share of the
                device's usable bytes as a float in (0, 1].
            with_remedies: whether the error for a budget that no plan fits has remedies, which take simulations; the
                smallest peak is always in the error.
            seconds: the time limit of the search; None for no limit.

        Raises:
            BudgetError: no plan fits.
            KeyboardInterrupt: the search was interrupted before any plan was found to fit.
        """
        progress, self.steps.progress = self.steps.progress, limited(self.steps.progress, seconds)
        try:
            return self.fastest(budget, with_remedies=with_remedies)
        except (OutOfTime, KeyboardInterrupt) as end:
            return self.so_far(budget, end)
        finally:
            self.steps.progress = progress

    def so_far(self, budget: Budget, end: BaseException) -> ProvenPlan:
        """Returns the fastest plan for `budget` among the plans that were simulated so far.

        If no simulated plan fits and the time limit ended the search, the plan with the smallest estimated peak is
        simulated as well.

        Args:
            budget: as in `plan`.
            end: the signal that ended the search: an `OutOfTime`, or the interrupt from the keyboard.

        Raises:
            BudgetError: no plan fits; the message has the remedies that take few simulations.
            KeyboardInterrupt: no plan fits, and the keyboard ended the search.
        """
        limit = self._budget_bytes(budget)
        shown = self._shown(limit, end)
        fitting = [each for each in shown if each.taken_bytes <= limit]
        if not fitting:
            smallest = min(shown, key=lambda each: each.taken_bytes)
            raise self._refusal().error(smallest, limit, with_remedies=True, stopped=str(end))
        return self._best_so_far(fitting, limit, end)

    def _shown(self, limit: int, end: BaseException) -> list[Proven]:
        """Returns the plans that were simulated until `end`, and the estimated smallest plan if none fits `limit`."""
        shown = self.searches.shown()
        if all(each.taken_bytes > limit for each in shown):
            if isinstance(end, KeyboardInterrupt):
                raise end
            shown += self.searches.least()
        return shown

    def _best_so_far(self, shown: list[Proven], limit: int, end: BaseException) -> ProvenPlan:
        """Returns the fastest of the plans that were simulated until `end`, with a note that names `end`."""
        fitting = [each for each in shown if each.taken_bytes <= limit]
        best = min(fitting, key=lambda each: (not leaves_margin(each.taken_bytes, limit), each.preference))
        bound = min(self.searches.floor_seconds(), best.seconds)
        plan = self._proven_plan(Found(best, bound, len(shown)), limit)
        evidence = dataclasses.replace(plan.evidence, notes=(f"{reason(end)}: {SO_FAR}", *plan.evidence.notes))
        return ProvenPlan(plan, evidence, plan.decision)

    def fastest(self, budget: Budget, *, with_remedies: bool = True) -> ProvenPlan:
        """Returns the fastest plan for `budget`, for callers that call `so_far` after an interruption.

        Args:
            budget, with_remedies: as in `plan`.

        Raises:
            BudgetError: no plan fits.
            OutOfTime, KeyboardInterrupt: the search ended early.
        """
        limit = self._budget_bytes(budget)
        policy = self._select(limit)
        if leaves_margin(self.plain.taken_bytes, limit):
            return self._unchanged(limit, policy)
        check_link(self.config, self.hardware)

        def find() -> Answer:
            found, decision = None, None
            floor = self.searches.floor_bytes()
            if floor <= limit:
                if policy is None:
                    found = self.searches.fastest(limit)
                else:
                    found, decision = self._by_policy(limit, policy)
            widest = self.config if policy is None else everything(self.config)
            smallest = self.searches.smallest(widest, floor if floor > limit else 0, limit) if found is None else None
            if smallest is not None and smallest.proven.taken_bytes <= limit:
                found = smallest
            if found is None:
                assert smallest is not None, "it was looked for"
                return Answer(fault=self._refusal().error(smallest.proven, limit, with_remedies=with_remedies))
            return Answer((self._proven_plan(found, limit, decision),))

        request = f"plan {limit}" if policy is None else f"plan {limit} {policy!r}"
        request += "" if with_remedies else ", no more"
        return self._answer(request, find).plan()

    def nearest(self, budget: Budget) -> ProvenPlan:
        """Returns the fastest plan whose step takes at most `budget`; the smallest plan if no plan fits."""
        limit = self._budget_bytes(budget)
        if leaves_margin(self.plain.taken_bytes, limit):
            return self._unchanged(limit)

        def find() -> Answer:
            return Answer((self._nearest(limit),))

        return self._answer(f"nearest {limit}", find).plan()

    def _nearest(self, limit: int) -> ProvenPlan:
        return self._proven_plan(self.searches.fastest(limit) or self.searches.smallest(enough_bytes=limit), limit)

    def smallest(self) -> ProvenPlan:
        """Returns the plan whose step takes the fewest bytes."""

        def find() -> Answer:
            found = self.searches.smallest()
            return Answer((self._proven_plan(found, found.proven.taken_bytes),))

        return self._answer("smallest", find).plan()

    def frontier(self, points: int = POINTS, *, seconds: float | None = None) -> Frontier:
        """Returns the frontier of plans for `points` budgets, from the smallest peak to that of the step as written.

        Interrupted from the keyboard, or after `seconds`, the frontier has the plans that were simulated until then.
        """
        check_count(f"frontier(points={points!r})", points, 2)
        check_link(self.config, self.hardware)
        most = self.plain.taken_bytes

        def find() -> Answer:
            smallest = self.searches.smallest()
            least = min(most, smallest.proven.taken_bytes)
            limits = [least + (most - least) * at // (points - 1) for at in range(points - 1)]
            return Answer(tuple(map(self._nearest, limits)))

        progress, self.steps.progress = self.steps.progress, limited(self.steps.progress, seconds)
        try:
            found = self._answer(f"frontier {points}", find).plans
        except (OutOfTime, KeyboardInterrupt) as end:
            fitting = [each for each in self._shown(most - 1, end) if each.taken_bytes < most]
            found = tuple(self._best_so_far(fitting, each.taken_bytes, end) for each in fitting)
        finally:
            self.steps.progress = progress
        return Frontier.of(map(Point.of, (*found, self._unchanged(most))))

    def _answer(self, request: str, find: Callable[[], Answer]) -> Answer:
        return self._plan_cache.answer(request, find, about=self.about, proofs=self.proofs)

    def about(self) -> dict[str, str]:
        """Returns the fingerprint of all that the engine's answers depend on, by name."""
        stepping = sorted(self.stepping.items(), key=repr)
        return {
            **fingerprint(self.step, self.plain_step, self.config, self.hardware),
            "figures": repr(Figures.of(self.plain)),
            "requested": f"{self.step.loop!r} {self.streams} {self._nominal} {stepping} {self.made_for}",
        }

    @property
    def simulations(self) -> int:
        """Returns the number of steps that were simulated."""
        return self.steps.count

    def proofs(self) -> Proofs:
        """Returns the proofs of cached plans, on the engine's step."""

        def simulate(plan: Plan) -> Profile:
            self.steps.say("a cached plan")
            if any(each.spelling == "tile" for rule in plan for each in chain(rule.transform)):
                with proven_rows():  # a model whose blocks couple rows may make the same trace as one whose do not
                    self.steps.profile(plan)
            return self.steps.profile(plan)

        config = everything(self.config) if self.config.auto_policy else self.config
        return Proofs(simulate, self.plain, self.hardware, self.searches.usable(config))

    # -- with a policy -------------------------------------------------------------------------------------------------

    def _select(self, limit: int) -> StrategyDecision | None:
        """Returns the policy's decision; None without ``auto_policy`` and on a CPU, where the config decides."""
        if not self.config.auto_policy or self.hardware.device_type == "cpu":
            return None
        context = StrategyContext.of(self.plain, self.hardware, limit, self.config)
        return select(context, self.config, planner=planner())

    def _as_given(self, limit: int) -> StrategyDecision:
        """Returns the decision of the config, for a plan without a policy."""
        asks = self.config.auto_policy  # then the CPU is the reason that no policy decided
        context = StrategyContext.of(self.plain, self.hardware, limit, self.config) if asks else None
        return select(context, self.config)

    def _by_policy(self, limit: int, policy: StrategyDecision) -> tuple[Found | None, StrategyDecision]:
        """Returns the fastest plan of the policy's techniques, and the decision.

        The techniques are widened step by step while no plan fits, or while the plan may be slower than others.
        """
        context = StrategyContext.of(self.plain, self.hardware, limit, self.config)
        best: Found | None = None
        for widened, config in widenings(policy, context, self.config):
            decision = dataclasses.replace(policy, widened=widened, config=config)
            found = self.searches.fastest(limit, config)
            if found is not None and (best is None or found.proven.seconds < best.proven.seconds):
                best = found
            if found is not None and (widened == "rules" or self._is_near_floor(found)):
                break
        return best, decision

    def _is_near_floor(self, found: Found) -> bool:
        return found.proven.seconds <= _NEAR * self.searches.floor_seconds()

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _refusal(self) -> Refusal:
        return Refusal(self.steps, self.config, self.searches)

    def _budget_bytes(self, budget: Budget) -> int:
        return budget_bytes(budget, self.hardware.usable_bytes)

    def _unchanged(self, limit: int, decision: StrategyDecision | None = None) -> ProvenPlan:
        taken = self.plain.taken_bytes
        takes, budget = format_unlike(taken, limit)
        trace = (f"no plan needed: the step as written takes {takes} of {budget}",)
        evidence = self._evidence(limit, self.plain, self.plain.step_seconds or 0.0, trace, (), {}, simulations=1)
        return ProvenPlan(Plan(), evidence, decision or self._as_given(limit))

    def _proven_plan(self, best: Found, limit: int, decision: StrategyDecision | None = None) -> ProvenPlan:
        found, bound = best.proven, best.bound_seconds
        trace = trace_of(best, limit, self.plain, self.searches.link)
        evidence = self._evidence(
            limit,
            found.profile,
            bound,
            trace,
            decisions_of(best),
            rejected_of(best),
            simulations=best.simulations + 1,
        )
        notes: list[str | None] = []
        if found.costs.streams(found.assignment) and not found.plan.of_optimizers():
            notes.append(lighter_update(self.plain, limit, self.step.optimizer))
        if "tile" not in self.config.eligible():
            notes.append(logits_of_head(self.model, self.hardware, found))
        elif all(rule.transform.numbers == "exact" for rule in found.plan):
            notes.append(_ROUNDS_NOTHING)
        evidence = dataclasses.replace(evidence, notes=(*evidence.notes, *filter(None, notes)))
        return ProvenPlan(with_globs(found.plan, self.model), evidence, decision or self._as_given(limit))

    def _evidence(
        self,
        limit: int,
        profile: Profile,
        bound_seconds: float,
        trace: tuple[str, ...],
        decisions: tuple[Decision, ...],
        rejected: Mapping[str, str],
        *,
        simulations: int,
    ) -> Evidence:
        nominal = (
            [f"step times are relative: {self.hardware.name} does not say how fast it is; pass Hardware.measure()"]
            if self._nominal and self.hardware.device_type != "cpu"  # whose profiles say so themselves
            else []
        )
        tight = (
            []
            if leaves_margin(profile.taken_bytes, limit)
            else ["it leaves less than 0.1 % of the budget, and a simulation may be off by as much"]
        )
        return Evidence(
            budget_bytes=limit,
            hardware=self.hardware,
            planned=Figures.of(profile),
            plain=Figures.of(self.plain),
            bound_seconds=bound_seconds,
            by_tier=profile.by_tier,
            trace=(*trace, f"loop: {self.step.loop}{kept_output(profile, self.step.loop)}"),
            decisions=decisions,
            rejected=rejected,
            notes=(*profile.notes, *nominal, *tight, *self.searches.notes()),
            simulations=simulations,
            parallel=self.made_for,
        )


def check_model(model: Any, caller: str) -> None:
    """Raises ConfigError for a model that cannot be planned with any batch."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(model=...) takes a torch.nn.Module, got {type(model).__name__}; pass the model")
    if is_transformed(model):
        raise ConfigError(
            f"this {type(model).__name__} is transformed already; plan the model that it was made of (detach a "
            "wrapped one), and give that plan to transform"
        )
