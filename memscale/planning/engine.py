"""`plan`: the fastest composition of transforms that fits a budget, proved by simulating the step that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, Transform, is_transformed
from memscale.config import Config, check_config
from memscale.core import ConfigError, Loss, budget_bytes, check_count, format_unlike
from memscale.hardware import Hardware, knows_copies, narrow_dtype
from memscale.planning.beside import lighter_update
from memscale.planning.evidence.curve import Frontier, Point
from memscale.planning.evidence.decisions import decisions_of, rejected_of, trace_of
from memscale.planning.evidence.evidence import Decision, Evidence, Figures
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.fingerprint import fingerprint, planner
from memscale.planning.gains import gain_of_rounding, room_of_loop
from memscale.planning.parts.candidates import Candidate, Menu, Rules
from memscale.planning.parts.globs import with_globs
from memscale.planning.plan_cache import Answer, PlanCache, Proofs
from memscale.planning.refusal import Refusal
from memscale.planning.search.found import Found, Proven, fastest_of, smallest_of
from memscale.planning.search.search import Search, leaves_margin
from memscale.planning.speeds import dtypes_of, link_rates, timed
from memscale.planning.step_simulator import OutOfTime, Progress, StepSimulator, limited, reason
from memscale.planning.stepping import Way, checked, held_by_phase, hows, least_held, loop_share, ways
from memscale.planning.trials.trials import Trials
from memscale.policy import StrategyContext, StrategyDecision, everything, select, widenings
from memscale.simulation import Parallel, ParallelKind, Profile, Target, Trace, TrainingStep, analyse, hardware_for
from memscale.transforms import cast

Budget = int | float | str
POINTS = 12  # of a frontier

#: The share of a device that recommendations and `AutoTuner` leave free where no budget says otherwise: for other
#: processes, for libraries that PyTorch does not count, and because the last percent of speed is not worth a crash.
LEFT_FREE = 0.05

#: The note of a plan whose search was stopped, and of one that was interrupted from the keyboard.
SO_FAR = "the fastest of the plans that were simulated until then; a faster one may fit"
INTERRUPTED_SEARCH = f"{reason(KeyboardInterrupt())}: {SO_FAR}"

_ROUNDS_NOTHING = "rounding is allowed, and the fastest plan needs none: its results are equal bit for bit"

# A plan of few techniques that takes so much of what no plan can beat is taken, without a look at the others.
_NEAR = 1.02


def allowed(config: Config | None, *, exact: bool = True) -> Config:
    """What a plan may use: as `config` says, without one every transform that changes no bit.

    Args:
        config: one that allows `tile`, by name or by ``mode="aggressive"``, has asked for it.
        exact: False allows `tile`, whose sums are in another order, unless `config` sets ``enable_tiling`` itself.

    >>> sorted(allowed(None).eligible()), sorted(allowed(None, exact=False).eligible())
    (['checkpoint', 'offload'], ['checkpoint', 'offload', 'tile'])
    """
    if config is None:
        return Config(mode="aggressive", enable_tiling=not exact)
    if exact or "enable_tiling" in config.given:
        return config
    return dataclasses.replace(config, enable_tiling=True)


class DecisionEngine:
    """Plans steps of one model with one batch, for any budget; arguments and errors as in `memscale.plan`.

    What candidates cost is found once, at the first budget that the step as it is does not fit. With ``streams=False``
    no plan moves parameters, which then stay where the caller has them.

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
        """The engine of a step, which has its batch."""
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
        # FSDP2 and DDP have the parameters themselves.
        self.streams = streams and self.made_for is None
        self._searches: dict[tuple[frozenset[str], Way | None], list[Search]] = {}
        self._ways: list[Way] | None = None
        self.stepping = dict.fromkeys(self.config.eligible() & {"quantize_states"}) | checked(stepping)
        asked = hardware_for(step.model, hardware)
        self.steps = StepSimulator(step, Target.of(timed(asked, dtypes_of(self.model))), progress)
        self.plain_step = self.steps.as_it_is()
        self.hardware = self.steps.hardware
        self._link = link_rates(self.hardware, self.config)
        self._loop_share = loop_share(step.optimizer, self.hardware)
        self._nominal = self.hardware != asked
        self.plain = analyse(self.plain_step)
        self._plan_cache: PlanCache[DecisionEngine] = PlanCache()

    def plan(self, budget: Budget, *, tells: bool = True, seconds: float | None = None) -> ProvenPlan:
        """The fastest plan whose step takes at most `budget`, as in `memscale.plan`.

        Without `tells` the error that none fits has the smallest peak alone: what would help takes simulations.
        Interrupted from the keyboard, or after so many seconds, it returns the fastest plan that was simulated and
        fits, and a note says so.
        """
        progress, self.steps.progress = self.steps.progress, limited(self.steps.progress, seconds)
        try:
            return self.fastest(budget, tells=tells)
        except (OutOfTime, KeyboardInterrupt) as end:
            return self.so_far(budget, end)
        finally:
            self.steps.progress = progress

    def so_far(self, budget: Budget, end: BaseException) -> ProvenPlan:
        """The fastest plan for `budget` among those that were simulated until now; without one that fits, what is
        thought to take the least is simulated if it was time that ended the search.

        Args:
            budget: as in `plan`.
            end: of the search: an `OutOfTime`, or the interrupt from the keyboard.

        Raises:
            BudgetError: none fits, with what would help if that takes few simulations.
            KeyboardInterrupt: none fits, and that is what ended the search.
        """
        limit = self._budget_bytes(budget)
        shown = self._shown(limit, end)
        fitting = [each for each in shown if each.taken_bytes <= limit]
        if not fitting:
            smallest = min(shown, key=lambda each: each.taken_bytes)
            raise self._refusal().error(smallest, limit, tells=True, stopped=str(end))
        return self._best_so_far(fitting, limit, end)

    def _shown(self, limit: int, end: BaseException) -> list[Proven]:
        """The plans that were simulated until `end`, and what is thought to take the least if none fits `limit`."""
        usable = self._usable(self.config)
        shown = [
            each
            for searches in self._searches.values()
            for search in searches
            for each in search.shown
            if Candidate(tuple((rule.pattern, rule.transform) for rule in each.plan)).techniques <= usable
        ]
        if all(each.taken_bytes > limit for each in shown):
            if isinstance(end, KeyboardInterrupt):
                raise end
            least = min(self.ways, key=least_held, default=None)
            shown += [search.least() for search in self._searches_among(self._techniques(self.config), least)]
        return shown

    def _best_so_far(self, shown: list[Proven], limit: int, end: BaseException) -> ProvenPlan:
        """The fastest of the plans that were simulated until `end`, with a note of it."""
        fitting = [each for each in shown if each.taken_bytes <= limit]
        best = min(fitting, key=lambda each: (not leaves_margin(each.taken_bytes, limit), each.preference))
        bound = min(self._floor_seconds(), best.seconds)
        plan = self._proven_plan(Found(best, bound, len(shown)), limit)
        evidence = dataclasses.replace(plan.evidence, notes=(f"{reason(end)}: {SO_FAR}", *plan.evidence.notes))
        return ProvenPlan(plan, evidence, plan.decision)

    def fastest(self, budget: Budget, *, tells: bool = True) -> ProvenPlan:
        """The fastest plan for `budget`, for callers that call `so_far` when they are interrupted.

        Args:
            budget: as in `plan`.
            tells: False leaves what would help out of the error that none fits.

        Raises:
            BudgetError: no plan fits.
            OutOfTime, KeyboardInterrupt: the search has ended before it was done.
        """
        limit = self._budget_bytes(budget)
        asked = self._select(limit)
        if leaves_margin(self.plain.taken_bytes, limit):
            return self._unchanged(limit, asked)
        self._check_link()

        def find(engine: DecisionEngine) -> Answer:
            found, decision = None, None
            floor = engine._floor_bytes()
            if floor <= limit:
                found, decision = (engine._fastest(limit), None) if asked is None else engine._by_policy(limit, asked)
            widest = engine.config if asked is None else everything(engine.config)
            smallest = engine._smallest(widest, floor if floor > limit else 0, limit) if found is None else None
            if smallest is not None and smallest.proven.taken_bytes <= limit:
                found = smallest
            if found is None:
                assert smallest is not None, "it was looked for"
                return Answer(fault=engine._refusal().error(smallest.proven, limit, tells=tells))
            return Answer((engine._proven_plan(found, limit, decision, tells_room=tells),))

        request = f"plan {limit}" if asked is None else f"plan {limit} {asked.to_json()}"
        request += "" if tells else ", no more"
        return self._plan_cache.answer(self, request, find).plan()

    def nearest(self, budget: Budget) -> ProvenPlan:
        """The fastest plan whose step takes at most `budget`; the smallest one where none does."""
        limit = self._budget_bytes(budget)
        if leaves_margin(self.plain.taken_bytes, limit):
            return self._unchanged(limit)

        def find(engine: DecisionEngine) -> Answer:
            found = engine._fastest(limit) or engine._smallest()
            return Answer((engine._proven_plan(found, limit),))

        return self._plan_cache.answer(self, f"nearest {limit}", find).plan()

    def smallest(self) -> ProvenPlan:
        """The plan whose step takes the least."""

        def find(engine: DecisionEngine) -> Answer:
            found = engine._smallest()
            return Answer((engine._proven_plan(found, found.proven.taken_bytes),))

        return self._plan_cache.answer(self, "smallest", find).plan()

    def frontier(self, points: int = POINTS, *, seconds: float | None = None) -> Frontier:
        """Plans for `points` budgets from the smallest reachable peak to that of the step as it is.

        Interrupted from the keyboard, or after so many seconds, it returns the plans that were simulated until then.
        """
        check_count(f"frontier(points={points!r})", points, 2)
        self._check_link()
        most = self.plain.taken_bytes

        def find(engine: DecisionEngine) -> Answer:
            smallest = engine._smallest()
            least = min(most, smallest.proven.taken_bytes)
            limits = [least + (most - least) * at // (points - 1) for at in range(points - 1)]
            return Answer(tuple([engine._proven_plan(engine._fastest(limit) or smallest, limit) for limit in limits]))

        progress, self.steps.progress = self.steps.progress, limited(self.steps.progress, seconds)
        try:
            found = self._plan_cache.answer(self, f"frontier {points}", find).plans
        except (OutOfTime, KeyboardInterrupt) as end:
            fitting = [each for each in self._shown(most - 1, end) if each.taken_bytes < most]
            found = tuple(self._best_so_far(fitting, each.taken_bytes, end) for each in fitting)
        finally:
            self.steps.progress = progress
        return Frontier.of(map(Point.of, (*found, self._unchanged(most))))

    def about(self) -> dict[str, str]:
        """All that its answers depend on."""
        stepping = sorted(self.stepping.items(), key=repr)
        return {
            **fingerprint(self.step, self.config, self.hardware),
            # Whatever else there is, edited code, hooks, flags: what it does to the step shows here.
            "step": f"{self.plain_step.digest()} {Figures.of(self.plain)}",
            "asked": f"{self.step.loop!r} {self.streams} {self._nominal} {stepping} {self.made_for}",
        }

    @property
    def simulations(self) -> int:
        """How many steps were simulated."""
        return self.steps.count

    def proofs(self) -> Proofs:
        """The proofs of plans for its step, as it is now."""

        def simulate(plan: Plan) -> Profile:
            self.steps.say("a plan of before")
            return self.steps.profile(plan)

        config = everything(self.config) if self.config.auto_policy else self.config
        return Proofs(simulate, self.plain, self.hardware, self._usable(config))

    # -- searches -----------------------------------------------------------------------------------------------------

    @property
    def searches(self) -> list[Search]:
        """Among the exact transforms that the config allows; and, where it allows that, among them in a model that is
        cast."""
        return self._searches_among(self._techniques(self.config))

    def _searches_among(self, among: frozenset[str], way: Way | None = None) -> list[Search]:
        """The searches among these techniques, in a step that goes a way."""
        if (among, way) not in self._searches:
            if way is None:
                menu = Menu.of(among, narrow_dtype(self.hardware), self.step.batch)
                found = [self._search(menu, plain=self.plain_step)]
                if "cast" in self.config.eligible():
                    always = (("", cast(compute=menu.dtype)),)
                    found.append(self._search(dataclasses.replace(menu, casts=True), always=always))
            else:
                found = [
                    self._search(
                        each.menu,
                        always=(*each.always, *way.rules),
                        plain=None if each.always else way.plain,
                        trials=each.trials if way.keeps_trials else None,
                    )
                    for each in self._searches_among(among)
                ]
            self._searches[among, way] = found  # whole, whenever the search was stopped
        return self._searches[among, way]

    def _search(
        self, menu: Menu, *, always: Rules = (), plain: Trace | None = None, trials: Trials | None = None
    ) -> Search:
        return Search(
            self.model,
            self.steps.simulate,
            menu,
            always=always,
            link=self._link,
            plain=plain,
            trials=trials,
            loop_share=self._loop_share,
        )

    @property
    def ways(self) -> list[Way]:
        """The ways to step that help and are allowed, the fastest first."""
        if self._ways is None:
            found = hows(self.step.optimizer, self.stepping, moves=self._link is not None)
            self._ways = ways(found, self.plain_step, self.steps.simulate)
        return self._ways

    def _check_link(self) -> None:
        asked = self.config.enable_offloading and not self.config.given.isdisjoint(
            ("enable_offloading", "async_offload")
        )
        if asked and self.hardware.unified_memory:
            raise ConfigError(
                f"the config asks for offloading, and {self.hardware.name} has no memory but its host's, so nothing "
                "becomes free by it; leave enable_offloading to the mode, or offload to the disk by hand"
            )
        if asked and not knows_copies(self.hardware):
            raise ConfigError(
                f"the config asks for offloading, and {self.hardware.name} does not say how fast its link is; give "
                "Hardware(...) host_to_device_bytes_per_second and device_to_host_bytes_per_second, pass "
                "Hardware.measure() there, or leave enable_offloading to the mode"
            )

    def _techniques(self, config: Config) -> frozenset[str]:
        """What a config lets a plan do to the model exactly."""
        found = set(config.eligible()) - {"cast", "quantize_states"}
        if self._link is None:
            found.discard("offload")
        elif "offload" in found and self.streams:
            found.add("stream")
        return frozenset(found)

    def _usable(self, config: Config) -> frozenset[str]:
        """What a config lets a plan do, whatever it changes."""
        return self._techniques(config) | (self.config.eligible() & {"cast"}) | self.stepping.keys()

    def _fastest(self, limit: int, config: Config | None = None) -> Found | None:
        """The fastest plan for `limit` bytes, of what a config allows; by default the engine's own."""
        among = self._techniques(config or self.config)
        found = [best for search in self._searches_among(among) if (best := search.fastest(limit)) is not None]
        for way in self.ways:
            seconds = analyse(way.plain).step_seconds or 0.0
            # No transform of the model makes a step faster than its way to step is without any.
            if "cast" in self.config.eligible() or all(seconds < each.proven.seconds for each in found):
                searches = self._searches_among(among, way)
                found += [best for search in searches if (best := search.fastest(limit)) is not None]
        return fastest_of(found)

    # -- with a policy in front ----------------------------------------------------------------------------------------

    def _select(self, limit: int) -> StrategyDecision | None:
        """What the policy chooses; None where there is none to ask, and everything is as if there never was one."""
        if not self.config.auto_policy or self.hardware.device_type == "cpu":
            return None
        context = StrategyContext.of(self.plain, self.hardware, limit, self.config)
        return select(context, self.config, planner=planner())

    def _as_given(self, limit: int) -> StrategyDecision:
        """That the config decided: no policy was asked."""
        asks = self.config.auto_policy  # of which a CPU is the reason
        context = StrategyContext.of(self.plain, self.hardware, limit, self.config) if asks else None
        return select(context, self.config)

    def _by_policy(self, limit: int, asked: StrategyDecision) -> tuple[Found | None, StrategyDecision]:
        """The fastest plan of what the policy chose, or of more where that may lose time or does not fit."""
        context = StrategyContext.of(self.plain, self.hardware, limit, self.config)
        best: Found | None = None
        for widened, config in widenings(asked, context, self.config):
            decision = dataclasses.replace(asked, widened=widened, config=config)
            found = self._fastest(limit, config)
            if found is not None and (best is None or found.proven.seconds < best.proven.seconds):
                best = found
            if found is not None and (widened == "rules" or found.proven.seconds <= _NEAR * self._floor_seconds()):
                break
        return best, decision

    def _floor_seconds(self) -> float:
        """No plan is faster, whatever is eligible: transforms that are exact only add to a step."""
        casting = self.searches[1:] if "cast" in self.config.eligible() else []
        steps = [self.plain_step, *(each.plain for each in casting), *(way.plain for way in self.ways)]
        return min(analyse(step).step_seconds or 0.0 for step in steps)

    def _floor_bytes(self) -> int:
        """No plan takes less: where parameters stay, only a way to step changes what is held while the optimizer steps.

        Looking for the fastest plan of a Llama 70B on eight cards took ten simulations before it was told that.
        """
        if self.streams:
            return 0
        steps = [self.plain_step, *(way.plain for way in self.ways)]
        return min(held_by_phase(analyse(step)).get("optimizer", 0) for step in steps)

    def _smallest(self, config: Config | None = None, floor_bytes: int = 0, enough_bytes: int = 0) -> Found:
        # What keeps the least for the whole step, whatever the model does.
        least, among = min(self.ways, key=least_held, default=None), self._techniques(config or self.config)
        searches = [each for way in dict.fromkeys((None, least)) for each in self._searches_among(among, way)]
        return smallest_of([search.smallest(floor_bytes, enough_bytes) for search in searches], enough_bytes)

    # -- what is said of them ------------------------------------------------------------------------------------------

    def _refusal(self) -> Refusal:
        return Refusal(self.steps, self.config, lambda config: self._searches_among(self._techniques(config))[0])

    def _budget_bytes(self, budget: Budget) -> int:
        return budget_bytes(budget, self.hardware.usable_bytes)

    def _unchanged(self, limit: int, decision: StrategyDecision | None = None) -> ProvenPlan:
        taken = self.plain.taken_bytes
        takes, budget = format_unlike(taken, limit)
        trace = (f"no plan needed: the step as it is takes {takes} of {budget}",)
        evidence = self._evidence(limit, self.plain, self.plain.step_seconds or 0.0, trace, (), {}, simulations=1)
        return ProvenPlan(Plan(), evidence, decision or self._as_given(limit))

    def _proven_plan(
        self, best: Found, limit: int, decision: StrategyDecision | None = None, *, tells_room: bool = False
    ) -> ProvenPlan:
        found, bound = best.proven, best.bound_seconds
        trace = trace_of(best, limit, self.plain, self._link)
        room = room_of_loop(self.steps, found) if tells_room else ""
        evidence = self._evidence(
            limit,
            found.profile,
            bound,
            trace,
            decisions_of(best),
            rejected_of(best),
            simulations=best.simulations + 1,
            room=room,
        )
        if found.costs.streams(found.assignment) and not found.plan.of_optimizers():
            lighter = lighter_update(self.plain, limit, self.step.optimizer)
            evidence = dataclasses.replace(evidence, notes=(*evidence.notes, *filter(None, [lighter])))
        tiles = "tile" in self.config.eligible()
        if tells_room and not tiles and (rounded := gain_of_rounding(self.steps, self.hardware, found, limit)):
            evidence = dataclasses.replace(evidence, notes=(*evidence.notes, rounded))
        if tells_room and tiles and all(rule.transform.numbers == "exact" for rule in found.plan):
            evidence = dataclasses.replace(evidence, notes=(*evidence.notes, _ROUNDS_NOTHING))
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
        room: str = "",
    ) -> Evidence:
        nominal = (
            [f"step times are relative: {self.hardware.name} does not say how fast it is; pass Hardware.measure()"]
            if self._nominal
            else []
        )
        tight = (
            []
            if leaves_margin(profile.taken_bytes, limit)
            else ["it leaves less than 0.1 % of the budget, and a simulation may be off by as much"]
        )
        sought = dict.fromkeys(note for search in self.searches for note in search.notes)
        return Evidence(
            budget_bytes=limit,
            hardware=self.hardware,
            planned=Figures.of(profile),
            plain=Figures.of(self.plain),
            bound_seconds=bound_seconds,
            by_tier=profile.by_tier,
            trace=(*trace, f"loop: {self.step.loop}{room}"),
            decisions=decisions,
            rejected=rejected,
            notes=(*profile.notes, *nominal, *tight, *sought),
            simulations=simulations,
            parallel=self.made_for,
        )


def check_model(model: Any, caller: str) -> None:
    """Raise ConfigError for what cannot be planned, whatever the batch is."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(model=...) takes a torch.nn.Module, got {type(model).__name__}; pass the model")
    if is_transformed(model):
        raise ConfigError(
            f"this {type(model).__name__} is transformed already; plan the model that it was made of (detach a "
            "wrapped one), and give that plan to transform"
        )
