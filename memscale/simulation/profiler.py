"""`MemoryProfiler`: the memory of a training step, simulated; measured on real steps where it cannot be."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, PlanLike, as_plan, find_regions, install, transform, uninstall
from memscale.config import Config, check_config
from memscale.core import ConfigError, Loss, MemscaleError, check_loss, one_at_a_time
from memscale.core import tensors as tensors_of
from memscale.hardware import Hardware
from memscale.optimizers import TransformedOptimizer, without_states
from memscale.simulation.checks import about_compiled, check_call, check_followed, check_optimizer
from memscale.simulation.dispatch.host_time import HostTime
from memscale.simulation.dispatch.values import NeedsValues
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.measured.empirical import measured_profile
from memscale.simulation.parallel.asked import Parallel, Ranks, check_places, one_rank
from memscale.simulation.parallel.sharded import mesh_of
from memscale.simulation.results import Profile, as_hardware
from memscale.simulation.sandbox.draws import PYTHON_DRAWN, Draws, drawing
from memscale.simulation.sandbox.garbage import few_collections
from memscale.simulation.sandbox.sandbox import Simulation
from memscale.simulation.simulated_step import SimulatedStep
from memscale.simulation.simulation_cost import own_cost
from memscale.simulation.step import training_step
from memscale.telemetry import uncounted

_STEPS = 2  # the first makes the optimizer's states, the second has them
# Of a probe, so that the step's own Python is timed more than once.
_TIMED_STEPS, _TIMING_SECONDS = 4, 0.5


class MemoryProfiler:
    """Profiles steps of one model with different batches.

    Static first: the step is simulated, operators without a rule for their shapes run on zeros. If the step reads
    values that only a real run computes, it is measured on ``config.warmup_steps`` real steps and one more, and
    everything they changed is put back. ``config.use_static_profiling`` and ``config.use_empirical_fallback`` turn the
    two off.

    >>> import torch, memscale as ms
    >>> profiler = ms.MemoryProfiler(torch.nn.Linear(8, 8), loss=lambda y, _: y.sum())
    >>> small, large = (profiler.profile(torch.ones(rows, 8)).peak_bytes for rows in (10, 20))
    >>> large - small  # ten rows of input, and ten of an output and of the one before it
    960

    Args:
        model, optimizer, loss, plan, hardware, keeps_output, probe, parallel, world, shard, tensor: as in `profile`.
        config: None is ``Config()``.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss: Loss | None = None,
        plan: PlanLike | None = None,
        hardware: Hardware | str | None = None,
        config: Config | None = None,
        keeps_output: bool = True,
        probe: bool = False,
        parallel: Parallel | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        self.ranks = Ranks.of(model, parallel, world, shard, tensor, caller="profile")
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.keeps_output = keeps_output
        check_config(config)
        self.config = config if config is not None else Config()
        self._output: list[Any] = []
        self._rules = Plan()  # for the optimizer
        self._in_place = Plan()  # for a model that its owner distributed, which no copy would be
        self._about_plan: tuple[str, ...] = ()
        if not isinstance(model, nn.Module):
            if not callable(model):
                raise ConfigError(
                    f"profile(model=...) takes a torch.nn.Module or a function that runs one step, got "
                    f"{type(model).__name__}; pass the model itself"
                )
            if plan is not None:
                raise ConfigError("profile(plan=...) needs a module; apply transform(model, plan) inside the function")
            if not keeps_output:
                raise ConfigError(
                    "profile(keeps_output=False) is about the loop around a module; a function is its own loop"
                )
        elif plan is not None:
            plan = as_plan(plan)
            already = None if self.ranks is not None else Ranks.of_distributed(model)
            if plan.parallel not in (None, self.ranks) and not plan.parallel.is_like(already):
                here = self.ranks or already or "one process's alone"
                self._about_plan = (f"the plan was made for {plan.parallel}, and this step is {here}",)
            self._rules = plan.of_optimizers()
            if already is None:
                self.model = uncounted(transform)(model, plan.of_functions())
            else:
                self._in_place = plan.of_functions()
                find_regions(model, self._in_place)
        check_followed(model)
        check_optimizer(self.model, optimizer)
        check_loss(loss)
        self.hardware = as_hardware(hardware, _device_type(self.model))
        self.kernels = Kernels(self.hardware, probe=probe)

    def profile(self, batch: Any = None, *, accumulate: int = 1, capacity_bytes: int | None = None) -> Profile:
        """The memory of a step with this batch; arguments and errors as in `memscale.profile`.

        `capacity_bytes` is what a simulated CUDA device gives to the step, where that is less than all it can
        (``hardware.usable_bytes``): PyTorch gives back cached memory before it goes beyond.
        """
        with self._under_rules() as profiler:
            return profiler._profile(batch, accumulate, capacity_bytes)

    def _profile(self, batch: Any, accumulate: int, capacity_bytes: int | None) -> Profile:
        step = self._step(batch, accumulate, self._kept())
        if not self.config.use_static_profiling:
            return self._measure(step, batch, "Config(use_static_profiling=False)")
        try:
            return self._simulate(step, batch, capacity_bytes)
        except ConfigError:
            raise
        except NeedsValues as error:
            reason = str(error)
        except MemscaleError:
            raise
        except Exception as error:  # the model's own, or one that only a simulation provokes: a real step tells which
            reason = f"{type(error).__name__}: {error}"
            if _is_on_meta(self.model):
                numbers = any(each.is_meta and not each.is_floating_point() for each in tensors_of(batch))
                zeros = ": its numbers on meta are taken for zeros, which may be padding to it, so give real ones"
                raise ConfigError(
                    f"the step fails: {reason}. Check that the batch is what the model is called with"
                    f"{zeros if numbers else ''}; if it does run on a real device, build the model there"
                ) from error
        return self._measure(step, batch, reason)

    def _kept(self) -> list[Any] | None:
        """Where the steps of one loop keep their output, as in `training_step`, until the simulation is over."""
        return self._output if self.keeps_output and isinstance(self.model, nn.Module) else None

    def _step(self, batch: Any, accumulate: int, kept: list[Any] | None) -> Callable[[], object]:
        check_call(self.model, batch, accumulate)
        if not isinstance(self.model, nn.Module):
            return self.model
        return training_step(self.model, batch, self.optimizer, self.loss, accumulate, kept=kept)

    def simulated(self, batch: Any, *, accumulate: int = 1, updates: bool = True) -> SimulatedStep:
        """The step by simulation alone, with what its modules hold and when.

        Args:
            batch, accumulate: as in `profile`.
            updates: whether the optimizer steps; without, only forward and backward are simulated, and gradients stay.

        Raises:
            ConfigError, NeedsValues, or what the model raises: the step cannot be simulated.
        """
        with self._under_rules() as profiler:
            model = profiler.model
            # Without an optimizer there is no update, either: a step that drops its gradients would hide what they are.
            if updates and (profiler.optimizer is not None or not isinstance(model, nn.Module)):
                return profiler._simulated([profiler._step(batch, accumulate, self._kept())] * _STEPS, batch)
            assert isinstance(model, nn.Module), "a function's own step updates what it updates"
            check_call(profiler.model, batch, accumulate)
            # The first step is no step like others: regions copy their inputs until they know what they write to.
            # Gradients that are still there after the last are known for what they are.
            stepping = profiler.optimizer
            # What steps in backward counts on the step that ends it.
            ends = isinstance(stepping, TransformedOptimizer) and stepping.steps_in_backward
            kept = self._kept()
            steps = [
                training_step(model, batch, stepping if ends else None, self.loss, accumulate, kept=kept, drops=drops)
                for drops in (True, False)
            ]
            return profiler._simulated(steps, batch)

    def reserved_over(
        self, batches: Sequence[Any], *, accumulate: int = 1, capacity_bytes: int | None = None
    ) -> int | None:
        """What the allocator of a CUDA device reserves at its most over steps with these batches, in their order.

        Blocks that one step leaves in the cache need not suit the next one, whose batch is longer or shorter: then more
        is reserved than for any of them alone. None where the device has no such allocator.

        Args:
            batches: at least one.
            accumulate, capacity_bytes: as in `profile`.

        Raises:
            ConfigError, NeedsValues, or what the model raises: a step cannot be simulated.
        """
        with self._under_rules() as profiler:
            kept = self._kept()
            steps = [profiler._step(batch, accumulate, kept) for batch in batches]
            # The first step makes the optimizer's states.
            return profiler._simulated([steps[0], *steps], list(batches)).profile(capacity_bytes).reserved_peak_bytes

    @contextmanager
    def _under_rules(self) -> Iterator[MemoryProfiler]:
        """This, with the optimizer under its rules: only now, for some act on parameters as long as they are there."""
        with one_at_a_time(), self._ruled() as ruled:
            yield ruled

    @contextmanager
    def _ruled(self) -> Iterator[MemoryProfiler]:
        if self.ranks is not None:
            assert isinstance(self.model, nn.Module), "checked with the other arguments"
            with one_rank(self.model, self.optimizer, self.ranks) as (part, over):
                ranked = copy.copy(self)
                ranked.ranks, ranked.model, ranked.optimizer = None, part, over
                with ranked._ruled() as each:
                    yield each
            return
        if self._in_place:
            assert isinstance(self.model, nn.Module), "a function has no plan"
            # FSDP2 gathers parameters in the very modules that it sharded, as wrap() finds them.
            before = install(self.model, self._in_place)
            try:
                check_places(self.model)
                installed = copy.copy(self)
                installed._in_place = Plan()
                with installed._ruled() as each:
                    yield each
            finally:
                uninstall(before)
            return
        if not self._rules:
            yield self
            return
        # States that the caller has would be moved, or copied for there are two optimizers: a step makes them anew.
        given = None if self.optimizer is None else without_states(self.optimizer)
        assert isinstance(self.model, nn.Module), "a function has no plan"
        found: Any = uncounted(transform)(self.model, self._rules, optimizer=given)
        profiler = copy.copy(self)
        profiler._rules, profiler.optimizer = Plan(), found[1]
        try:
            yield profiler
        finally:
            assert isinstance(found[1], TransformedOptimizer), "each rule is for one of its parameters"
            found[1].let_go()

    def _simulated(self, steps: Sequence[Callable[[], object]], batch: Any) -> SimulatedStep:
        """The step; where random numbers decide what it does, as LayerDrop, what takes most of three ways to draw."""
        found = [self._with_draws(steps, batch, Draws.SEEDED)]
        for draws in (Draws.LEAST, Draws.MOST) if found[0].goes_by_draws else ():
            with contextlib.suppress(Exception):  # it may wait for a number that is never drawn there
                found.append(self._with_draws(steps, batch, draws))
        return found[0] if len(found) == 1 else max(found, key=lambda step: step.profile().taken_bytes)

    def _with_draws(self, steps: Sequence[Callable[[], object]], batch: Any, draws: Draws) -> SimulatedStep:
        """The step, its compiled modules as graphs; as they are written where a graph fails as it runs."""
        followed: set[int] = set()
        try:
            return self._on_the_device(steps, batch, draws, (), followed)
        except ConfigError:
            raise
        except Exception as error:
            if not followed:
                raise
            told = next(iter(str(error).splitlines()), "")
            note = f"what the compiler makes of this step fails in the simulation ({type(error).__name__}: {told})"
            return self._on_the_device(steps, batch, draws, (note,), None)

    def _on_the_device(
        self,
        steps: Sequence[Callable[[], object]],
        batch: Any,
        draws: Draws,
        notes: tuple[str, ...],
        followed: set[int] | None,
    ) -> SimulatedStep:
        """The step on the device, and if its code goes where this machine cannot follow, the way that it goes here."""
        asked: list[str] = []
        try:
            with few_collections():
                return self._simulated_once(steps, batch, notes, asked, draws, followed)
        except ConfigError:
            raise
        except Exception as error:
            if not asked:
                raise
            note = (
                f"the step asks for {', '.join(asked)} and goes where it cannot be simulated on a CUDA device "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); simulated is the way "
                "that it goes on a CPU"
            )
            try:
                with few_collections():
                    return self._simulated_once(steps, batch, (*notes, note), None, draws, followed)
            except Exception:
                raise error from None  # it fails on a CPU, too

    def _simulated_once(
        self,
        steps: Sequence[Callable[[], object]],
        batch: Any,
        notes: tuple[str, ...],
        asked: list[str] | None,
        draws: Draws,
        followed: set[int] | None,
    ) -> SimulatedStep:
        """The last of `steps`.

        `asked` receives what it asks about its device, None leaves that without an answer; `followed` receives the
        compiled modules that ran as graphs, None has them run as they are written.
        """
        model = self.model if isinstance(self.model, nn.Module) else None
        host = HostTime(own_cost()) if self.kernels.is_timed else None
        simulation = Simulation(
            steps[-1],
            model,
            self.optimizer,
            batch,
            kernels=self.kernels,
            host=host,
            answering=asked is not None,
            as_graphs=followed is not None,
            draws=draws,
        )
        try:
            with simulation, drawing(draws) as is_drawn:
                for step in steps:
                    simulation.step(step)
                # A policy whose results are changed in place goes another way, and DDP has other buckets after a step.
                is_one = all(step is steps[-1] for step in steps)
                if not simulation.mode.books.settled or (is_one and not simulation.mode.ledger.repeats()):
                    simulation.step(steps[-1])
                began, more = time.perf_counter(), 0
                while host is not None and more < _TIMED_STEPS and time.perf_counter() - began < _TIMING_SECONDS:
                    simulation.step(steps[-1])
                    more += 1
                drawn = is_drawn()
                simulation.let_go(self._output)
        finally:
            self._output.clear()
            self.kernels.save()
            if asked is not None and simulation.answers is not None:
                asked += simulation.answers.asked
            if followed is not None and simulation.compiled is not None:
                followed |= simulation.compiled.followed
        if simulation.answers is not None:
            notes = (*notes, *simulation.answers.notes)
        simulation.mode.ledger.add_in_place()
        runtimes = simulation.runtimes
        sent = simulation.mode.works.notes()
        found = (
            *sent,
            *self._about_plan,
            *simulation.mode.values.assumptions,
            *([PYTHON_DRAWN] if drawn else []),
            *self.kernels.notes(simulation.scope.modules),
            *about_compiled(simulation.scope.modules, simulation.compiled),
            *runtimes.notes(),
        )
        by_draws = drawn or simulation.mode.values.goes_by_draws
        return SimulatedStep(simulation.mode.ledger, simulation.clock, (*notes, *found), simulation.below(), by_draws)

    @few_collections()  # also between the simulation and what is made of it
    def _simulate(self, step: Callable[[], object], batch: Any, capacity_bytes: int | None) -> Profile:
        return self._simulated([step] * _STEPS, batch).profile(capacity_bytes, advises=True)

    def _measure(self, step: Callable[[], object], batch: Any, reason: str) -> Profile:
        if not self.config.use_empirical_fallback:
            raise ConfigError(
                f"the step cannot be simulated: {reason}. Allow real steps with Config(use_empirical_fallback=True), "
                "or make the model's control flow independent of computed values"
            )
        try:
            return measured_profile(self.model, step, self.optimizer, batch, self.config, self.hardware, reason)
        finally:
            self._output.clear()


def _is_on_meta(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters())


def _device_type(model: Any) -> str:
    if isinstance(model, nn.Module):
        if any(mesh.device_type == "cuda" for mesh in map(mesh_of, model.modules()) if mesh is not None):
            return "cuda"  # also where its shards are on the CPU
        for parameter in model.parameters():
            return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"
