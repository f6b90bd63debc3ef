"""`record`: the simulation of a training step under a plan for a device. The process is restored afterwards."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from memscale.algebra import Plan, PlanLike, as_plan, find_regions, install, transform, uninstall
from memscale.core import ConfigError, one_at_a_time
from memscale.optimizers import TransformedOptimizer, without_states
from memscale.simulation.analysis import analyse
from memscale.simulation.checks import about_compiled, about_key_values
from memscale.simulation.dispatch.tape import Tape
from memscale.simulation.packed import about_experts
from memscale.simulation.parallel.one_rank import check_places, one_rank
from memscale.simulation.parallel.spec import Parallel
from memscale.simulation.process.draws import PYTHON_DRAWN, Draws, drawing
from memscale.simulation.process.garbage import few_collections
from memscale.simulation.sandbox.compiled_modules import as_text
from memscale.simulation.sandbox.sandbox import Simulation
from memscale.simulation.step import Target, TrainingStep
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


@dataclass
class _Attempt:
    """A simulation's options, and the findings of one attempt with these options.

    Attributes:
        as_graphs: whether compiled modules run as their graphs, or as written.
        spoofs: whether code sees its tensors on the simulated device; false shows the CPU.
        followed: the ids of the compiled modules that ran as graphs.
        device_reads: the attributes and functions by which the code read its device.
    """

    as_graphs: bool
    spoofs: bool
    followed: set[int] = field(default_factory=set)
    device_reads: list[str] = field(default_factory=list)


def _followed(steps: _Steps, step: TrainingStep, target: Target, notes: tuple[str, ...], draws: Draws) -> Trace:
    """Returns the trace of the step with device spoofing and compiled graphs, or without them where the step fails.

    The notes of the trace name each fallback.
    """
    said: tuple[str, ...] = ()
    fault: Exception
    for as_graphs in (True, False):
        faults: list[Exception] = []
        followed: set[int] = set()
        for spoofs in (True, False):
            attempt = _Attempt(as_graphs, spoofs)
            try:
                with few_collections():
                    return _simulated(steps, step, target, (*notes, *said), draws, attempt)
            except ConfigError:
                raise
            except Exception as error:  # an error of the step, raised below unless a fallback succeeds
                followed |= attempt.followed
                faults.append(error)
                if not attempt.device_reads:
                    break
                said += (
                    f"the step reads {', '.join(attempt.device_reads)}, and its branch for a CUDA device cannot be "
                    f"simulated ({as_text(error)}); its branch for a CPU was simulated instead",
                )
        fault = faults[0]  # the error with device spoofing: on the real device the step would fail with this one
        if not followed:
            break
        said = (f"what the compiler makes of this step fails in the simulation ({as_text(fault)})",)
    raise fault


def _simulated(
    steps: _Steps,
    step: TrainingStep,
    target: Target,
    notes: tuple[str, ...],
    draws: Draws,
    attempt: _Attempt,
) -> Trace:
    """Returns the trace of `steps`, simulated with the options of `attempt`, and notes its findings there."""
    functions, kernels = steps.functions, target.kernels
    simulation = Simulation(
        functions[-1],
        step.module,
        step.optimizer,
        step.batch,
        kernels=kernels,
        spoofs=attempt.spoofs,
        as_graphs=attempt.as_graphs,
        draws=draws,
    )
    try:
        with simulation, drawing(draws) as is_drawn:
            for function in functions:
                simulation.step(function)
            # One more step where two differ: a policy may change after an in-place write, and DDP rebuilds its buckets.
            is_one = all(each is functions[-1] for each in functions)
            if not simulation.mode.recorder.settled or (is_one and not simulation.mode.builder.repeats()):
                simulation.step(functions[-1])
            measuring = () if target.times is None else _measured(simulation, functions[-1], target)
            drawn, cached = is_drawn(), about_key_values(steps.kept)
            simulation.let_go(steps.kept)
    finally:
        steps.kept.clear()
        kernels.save()
        if simulation.spoofing is not None:
            attempt.device_reads += simulation.spoofing.reads
        if simulation.compiled is not None:
            attempt.followed |= simulation.compiled.followed
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
        *about_experts(step.module),
        *cached,
        *simulation.runtimes.notes(),
    )
    reads_random = drawn or values.goes_by_draws
    return builder.trace(target.hardware, simulation.clock.times(), simulation.below(), (*notes, *found), reads_random)


def _relative(simulation: Simulation) -> tuple[str, ...]:
    """Returns a note if the seconds of a CPU's step follow from the rates of its hardware."""
    clock, recorder = simulation.clock, simulation.mode.recorder
    if not clock.is_host or not clock.timed or recorder.measured is not None:
        return ()
    return (
        "the seconds are relative: on a CPU operators differ from one rate of arithmetic and one of memory; "
        "profile(probe=True) measures them",
    )


def _measured(simulation: Simulation, function: Callable[[], object], target: Target) -> tuple[str, ...]:
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
    simulation.clock.timed = True  # whatever the hardware's rates say of the steps before
    recorder.measured = [found.seconds.get(at, share * work[at]) for at in range(first, len(builder.ops))]
    simulation.step(function)
    return found.notes
