"""`record`: the simulation of a training step under a plan for a device. The process is restored afterwards.

`MemoryProfiler` makes the profile of a step from the record; measured on real steps where it cannot be simulated.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale.algebra import Plan, PlanLike, as_plan, find_regions, install, transform, uninstall
from memscale.config import Config, check_config
from memscale.core import ConfigError, Loss, MemscaleError, check_count, interrupts_held, one_at_a_time
from memscale.core import tensors as tensors_of
from memscale.hardware import Hardware
from memscale.optimizers import TransformedOptimizer, without_states
from memscale.simulation.analysis import analyse
from memscale.simulation.dispatch.lazy_values import NeedsValues
from memscale.simulation.dispatch.step_recorder import place_of
from memscale.simulation.dispatch.tape import Tape
from memscale.simulation.measured.empirical import measured_profile
from memscale.simulation.parallel.spec import Parallel, ParallelKind, check_places, one_rank
from memscale.simulation.process.draws import PYTHON_DRAWN, Draws
from memscale.simulation.process.process_state import few_collections
from memscale.simulation.results import Profile
from memscale.simulation.rules.few_bits import notes_of_few_bits
from memscale.simulation.sandbox.compiled_modules import as_text
from memscale.simulation.sandbox.device_spoofing import needs_a_card
from memscale.simulation.sandbox.sandbox import Simulation
from memscale.simulation.step import Target, TrainingStep, about_compiled, about_key_values, hardware_for
from memscale.simulation.trace import Trace
from memscale.telemetry import uncounted

_FLOPS_PER_BYTE = 4  # FLOPs that a CPU computes in the time of moving one byte
_STEPS = 2  # the first makes the optimizer's states, the second has them


class _Steps(NamedTuple):
    """The steps of one loop as functions, and the list in which the loop keeps its output."""

    functions: Sequence[Callable[[], object]]
    kept: list[Any]


def record(step: TrainingStep, plan: Plan, target: Target, *, holds_gradients: bool = False) -> Trace:
    """Returns the trace of the step under a plan, simulated on the target.

    Args:
        step: the step, with its batch.
        plan: the transforms of the model and of the optimizer.
        target: the simulated device.
        holds_gradients: simulates forward and backward alone, and keeps the gradients to the end.

    Raises:
        ConfigError, NeedsValues, or an error of the model: the step cannot be simulated.
    """
    with under(step, plan) as one:
        kept: list[Any] = []
        steps = _forward_and_backward(one) if holds_gradients else _Steps([one.function(kept)] * _STEPS, kept)
        return _with_the_draws_that_take_most(steps, one, target, about(step, plan))


def record_in_a_row(steps: Sequence[TrainingStep], plan: Plan, target: Target) -> Trace:
    """Returns the trace of one loop over several batches: blocks cached for one batch may not fit the next.

    Args:
        steps: at least one step; the steps differ in their batches alone.
        plan, target: as in `record`.

    Raises:
        ConfigError, NeedsValues, or an error of the model: a step cannot be simulated.
    """
    with under(steps[0], plan) as one:
        kept: list[Any] = []
        functions = [dataclasses.replace(one, batch=each.batch).function(kept) for each in steps]
        batches = dataclasses.replace(one, batch=[each.batch for each in steps])
        # The first step makes the optimizer's states.
        loop = _Steps([functions[0], *functions], kept)
        return _with_the_draws_that_take_most(loop, batches, target, about(steps[0], plan))


@contextmanager
def under(step: TrainingStep, plan: Plan) -> Iterator[TrainingStep]:
    """Yields the step under `plan`: its model transformed, one rank's part of the model, its optimizer transformed.

    The step is valid in the body only, since some transforms of optimizers hook parameters until the body ends.

    Raises:
        PlanError, TransformError: the plan does not fit the model.
    """
    with one_at_a_time(), ExitStack() as stack:
        model = step.module
        if model is None:
            yield step
            return
        functions, rules = plan.of_functions(), plan.of_optimizers()
        if functions and step.is_distributed:
            # FSDP2 gathers parameters in the modules that it sharded, so these modules are transformed in place.
            stack.callback(uninstall, install(model, functions))
            check_places(model)
        elif functions:
            model = uncounted(transform)(model, functions)
        optimizer = step.optimizer
        if step.parallel is not None:
            model, optimizer = stack.enter_context(one_rank(model, optimizer, step.parallel))
        if rules:
            # Without states: the transforms would move or copy the caller's; the first simulated step makes new ones.
            given = None if optimizer is None else without_states(optimizer)
            transformed: Any = uncounted(transform)(model, rules, optimizer=given)
            optimizer = transformed[1]
            assert isinstance(optimizer, TransformedOptimizer), "each rule is for one of its parameters"
            stack.callback(optimizer.let_go)
        yield dataclasses.replace(step, model=model, optimizer=optimizer, parallel=None)


def check_plan(step: TrainingStep, plan: PlanLike | None) -> Plan:
    """Returns `plan` as a `Plan` for the step's model; None means a plan without rules.

    Raises:
        ConfigError: the step is a function.
        PlanError: `plan` is no plan, or names modules that the model lacks.
    """
    if plan is None:
        return Plan()
    if step.module is None:
        raise ConfigError("profile(plan=...) needs a module; apply transform(model, plan) inside the function")
    checked = as_plan(plan)
    find_regions(step.module, checked.of_functions())
    return checked


def about(step: TrainingStep, plan: Plan) -> tuple[str, ...]:
    """Returns a note if the plan was made for another parallel spec than the step's."""
    if plan.parallel in (None, step.parallel):
        return ()
    already = None if step.parallel is not None else Parallel.of_distributed(step.model)
    if plan.parallel.is_like(already):
        return ()
    here = step.parallel or already or "one process's alone"
    return (f"the plan was made for {plan.parallel}, and this step is {here}",)


def _forward_and_backward(step: TrainingStep) -> _Steps:
    """Returns the step without its update, twice; the second keeps its gradients.

    One step is not enough: in their first run regions copy their inputs, until they know what they write to. The
    gradients that live at the end are recognised as gradients.
    """
    assert isinstance(step.model, nn.Module), "a function's own step updates what it updates"
    # An optimizer that steps in backward needs its `step()` call, which ends the step.
    ends = isinstance(step.optimizer, TransformedOptimizer) and step.optimizer.steps_in_backward
    one = step if ends else dataclasses.replace(step, optimizer=None)
    kept: list[Any] = []
    return _Steps([one.function(kept, drops=drops) for drops in (True, False)], kept)


def _with_the_draws_that_take_most(steps: _Steps, step: TrainingStep, target: Target, notes: tuple[str, ...]) -> Trace:
    """Returns the trace with the most taken bytes among those of all `Draws`; of one if no random number was read."""
    found: list[Trace] = []
    for draws in Draws:
        try:
            found.append(_followed(steps, step, target, notes, draws))
        except Exception as error:
            if not found:
                raise
            # A loop may wait for a number that these draws never give.
            note = (
                f"with the {draws.name.lower()} of random numbers the step fails ({as_text(error)}) and does not count"
            )
            found = [dataclasses.replace(each, notes=(*each.notes, note)) for each in found]
        if not found[0].reads_random:
            break
    return found[0] if len(found) == 1 else max(found, key=lambda each: analyse(each).taken_bytes)


def _followed(steps: _Steps, step: TrainingStep, target: Target, notes: tuple[str, ...], draws: Draws) -> Trace:
    """Returns the trace of the step with device spoofing, or without it where the step's branch for CUDA needs a card.

    A note of the trace names such a branch by what it reads. Every other error is the step's own.
    """
    said: tuple[str, ...] = ()
    fault: Exception | None = None
    while True:
        with few_collections():
            simulation = Simulation(
                steps.functions[-1],
                step.module,
                step.optimizer,
                step.batch,
                kernels=target.kernels,
                spoofs=fault is None,
                draws=draws,
            )
            try:
                return _simulated(simulation, steps, step, target, (*notes, *said))
            except Exception as error:
                if fault is not None:
                    raise fault from error  # on the real device the step would fail with the first error
                spoofing = simulation.spoofing
                if spoofing is None or not spoofing.reads or not needs_a_card(error):
                    raise
                fault = error
        said = (
            f"the step reads {', '.join(spoofing.reads)}, and its branch for a CUDA device cannot be simulated "
            f"({as_text(fault)}); its branch for a CPU was simulated instead",
        )


def _simulated(
    simulation: Simulation, steps: _Steps, step: TrainingStep, target: Target, notes: tuple[str, ...]
) -> Trace:
    """Returns the trace of `steps`."""
    functions, kernels = steps.functions, target.kernels
    with interrupts_held, simulation, ExitStack() as stack:
        # Before the simulation ends, which looks for all that is left of it: an output holds the graph of its step.
        stack.callback(steps.kept.clear)
        stack.callback(kernels.save)
        for function in functions:
            simulation.step(function)
        # One more step where two differ: a policy may change after an in-place write, and DDP rebuilds its buckets.
        is_one = all(each is functions[-1] for each in functions)
        if not simulation.mode.recorder.settled or (is_one and not simulation.mode.builder.repeats()):
            simulation.step(functions[-1])
        measuring = () if target.times is None else _timed(simulation, functions[-1], target)
        drawn, cached = simulation.mode.randomness.is_drawn, about_key_values(steps.kept)
        simulation.let_go(steps.kept)
    builder, values = simulation.mode.builder, simulation.mode.values
    builder.add_in_place()
    found = (
        *(() if simulation.spoofing is None else simulation.spoofing.notes),
        *measuring,
        *_relative(simulation),
        *simulation.mode.works.notes(),
        *values.assumptions,
        *([PYTHON_DRAWN] if drawn else []),
        *kernels.notes(simulation.scope.modules),
        *about_compiled(simulation.scope.modules, simulation.compiled),
        *notes_of_few_bits(step.module, simulation.scope.modules),
        *cached,
        *simulation.runtimes.notes(),
    )
    reads_random = drawn or values.goes_by_draws
    return builder.trace(simulation.clock, simulation.below(), (*notes, *found), reads_random)


def _relative(simulation: Simulation) -> tuple[str, ...]:
    """Returns a note if the seconds of a CPU's step follow from the rates of its hardware."""
    clock, recorder = simulation.clock, simulation.mode.recorder
    if not clock.is_host or not clock.timed or recorder.measured is not None:
        return ()
    return (
        "the seconds are relative: on a CPU operators differ from one rate of arithmetic and one of memory; "
        "profile(probe=True) measures them",
    )


def _timed(simulation: Simulation, function: Callable[[], object], target: Target) -> tuple[str, ...]:
    """Simulates the step once more, with the seconds that its operators take on this machine, and returns notes."""
    assert target.times is not None, "the caller checks"
    recorder, builder = simulation.mode.recorder, simulation.mode.builder
    recorder.tape = tape = Tape(simulation.mode.storages.number)
    simulation.step(function)
    recorder.tape = None
    event, first = builder.steps[-1]
    deaths: dict[int, list[int]] = defaultdict(list)
    for each, op in zip(builder.events[event:], builder.event_ops[event:], strict=True):
        if each < 0:
            deaths[op].append(-each - 1)
    parameters = {number: each.shape for number, each in enumerate(builder.records) if each.category == "parameter"}
    found = target.times.of_step(tape, builder.ops, deaths, parameters)
    if not found.seconds:
        return found.notes
    work = [max(op.flops, _FLOPS_PER_BYTE * op.nbytes) for op in builder.ops]
    # What could not be measured takes as long for its work as what could.
    share = sum(found.seconds.values()) / (sum(work[at] for at in found.seconds) or 1)
    simulation.clock.trust()
    recorder.measured = [found.seconds.get(at, share * work[at]) for at in range(first, len(builder.ops))]
    simulation.step(function)
    return found.notes


class MemoryProfiler:
    """A profiler of steps of one model with different batches.

    The step is simulated; operators without a rule for their shapes run on zeros. A step that reads values of a real
    run is measured: ``config.warmup_steps`` real steps and one more run, and all changes are undone.
    ``config.use_static_profiling`` and ``config.use_empirical_fallback`` turn either off.

    >>> import torch, memscale as ms
    >>> profiler = ms.MemoryProfiler(torch.nn.Linear(8, 8), loss=lambda y, _: y.sum())
    >>> small, large = (profiler.profile(torch.ones(rows, 8)).peak_bytes for rows in (10, 20))
    >>> large - small  # ten rows of input, and ten of an output and of the one before it
    960

    Args:
        model, optimizer, loss, plan, hardware, keeps_output, probe, parallel, world, shard, tensor: as in `profile`.
        config: the settings; None means ``Config()``.
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
        parallel: ParallelKind | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        self.step = TrainingStep.of(
            model,
            optimizer,
            loss=loss,
            keeps_output=keeps_output,
            parallel=parallel,
            world=world,
            shard=shard,
            tensor=tensor,
        )
        check_config(config)
        self.config = config if config is not None else Config()
        self.plan = check_plan(self.step, plan)
        self.hardware = hardware_for(model, hardware)
        self.target = Target.of(self.hardware, probe=probe)

    def profile(self, batch: Any = None, *, accumulate: int = 1, capacity_bytes: int | None = None) -> Profile:
        """Returns the profile of a step with this batch; arguments and errors as in `memscale.profile`.

        `capacity_bytes` limits the memory of a simulated CUDA device below ``hardware.usable_bytes``: at the limit
        PyTorch's allocator returns cached memory before it fails.
        """
        return profile_of(self._on(batch, accumulate), self.plan, self.target, self.config, capacity_bytes)

    def simulated(self, batch: Any, *, accumulate: int = 1, updates: bool = True) -> Trace:
        """Returns the trace of the step, by simulation alone.

        Args:
            batch, accumulate: as in `profile`.
            updates: whether the optimizer steps; otherwise forward and backward are simulated alone, and gradients
                stay.

        Raises:
            ConfigError, NeedsValues, or an error of the model: the step cannot be simulated.
        """
        step = self._on(batch, accumulate)
        # A step without an optimizer keeps its gradients, too: dropped gradients would not be recognised as gradients.
        holds_gradients = not updates or (step.optimizer is None and step.module is not None)
        return record(step, self.plan, self.target, holds_gradients=holds_gradients)

    def _on(self, batch: Any, accumulate: int) -> TrainingStep:
        check_count(f"profile(accumulate={accumulate!r})", accumulate)
        loop = dataclasses.replace(self.step.loop, accumulate=accumulate)
        return dataclasses.replace(self.step, loop=loop).on(batch)


def profile_of(
    step: TrainingStep, plan: Plan, target: Target, config: Config, capacity_bytes: int | None = None
) -> Profile:
    """Returns the profile of a step under a plan: simulated, or measured on real steps where `config` allows that.

    Args:
        step: the step, with its batch.
        plan, target: as in `record`.
        config: see `MemoryProfiler`.
        capacity_bytes: see `MemoryProfiler.profile`.

    Raises:
        ConfigError: the step fails, or needs a real run that `config` forbids.
        RuntimeUnavailable: the step can be neither simulated nor run on this machine.
    """
    if not config.use_static_profiling:
        return _measured(step, plan, target, config, "Config(use_static_profiling=False)")
    try:
        with few_collections():  # also between the simulation and the analysis
            return analyse(record(step, plan, target), capacity_bytes, advises=True)
    except ConfigError:
        raise
    except NeedsValues as error:
        reason = str(error)
    except MemscaleError:
        raise
    except Exception as error:  # an error of the model, or of the simulation alone: a real step decides
        reason = f"{type(error).__name__}: {error}{place_of(error)}"
        if step.module is not None and any(parameter.is_meta for parameter in step.module.parameters()):
            numbers = any(each.is_meta and not each.is_floating_point() for each in tensors_of(step.batch))
            flex = "; attn_implementation='sdpa' takes attention that runs anywhere" * ("FlexAttention" in reason)
            zeros = ": its numbers on meta are taken for zeros, which may be padding to it, so give real ones"
            raise ConfigError(
                f"the step fails: {reason}. Check that the batch is what the model is called with"
                f"{zeros if numbers else ''}; if it does run on a real device, build the model there{flex}"
            ) from error
    return _measured(step, plan, target, config, reason)


def _measured(step: TrainingStep, plan: Plan, target: Target, config: Config, reason: str) -> Profile:
    if not config.use_empirical_fallback:
        raise ConfigError(
            f"the step cannot be simulated: {reason}. Allow real steps with Config(use_empirical_fallback=True), "
            "or make the model's control flow independent of computed values"
        )
    with under(step, plan) as one:
        return measured_profile(one, config, target.hardware, reason)
