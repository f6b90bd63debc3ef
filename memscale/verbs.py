"""`profile`, `plan` and `frontier`: the engines as functions, one engine for each call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, PlanLike, Transform
from memscale.config import Config
from memscale.core import Loss, Record, history_path
from memscale.hardware import Hardware
from memscale.planning import POINTS, Budget, DecisionEngine, Frontier, Progress, ProvenPlan, allowed, check_model
from memscale.simulation import (
    ParallelKind,
    Profile,
    Target,
    TrainingStep,
    check_plan,
    hardware_for,
    profile_of,
)
from memscale.telemetry import counted


def profile(
    model: nn.Module | Callable[[], object],
    batch: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    plan: PlanLike | None = None,
    hardware: Hardware | str | None = None,
    accumulate: int = 1,
    keeps_output: bool = True,
    probe: bool = False,
    parallel: ParallelKind | None = None,
    world: int | None = None,
    shard: Iterable[str] | str | None = None,
    tensor: int | None = None,
    record: Record = None,
) -> Profile:
    """The memory of a training step, found without running it: in seconds, on a laptop, for a model of any size.

    Forward, loss, backward, optimizer step and the dropping of gradients run twice with every kernel left out; what
    each tensor would take is recorded from its birth to its death. Nothing is changed: model, optimizer, gradients and
    random states are as before, also after an error.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> profile = ms.profile(model, torch.ones(32, 64), optimizer=optimizer, loss=lambda y, _: y.square().mean())
    >>> profile.peak_bytes, profile.moment.phase
    (439440, 'optimizer')
    >>> profile.by_category["optimizer state"] == 2 * profile.by_category["parameter"] + 4 * 4  # and four step counts
    True

    Args:
        model: a module on any device (``meta`` costs no memory), or a function without arguments that is one pass of a
            training loop; modules, optimizers and tensors that it uses are found.
        batch: what the model is called with: a tensor is one positional argument, a tuple or list the arguments, a
            mapping keyword arguments. None for a function.
        optimizer: the one that trains the model; None leaves the step at backward.
        loss: ``loss(output, batch)``, a scalar tensor. None takes the output's ``loss``, or the output if it is a
            tensor.
        plan: transforms to apply first, as in `transform`; the model stays as it is.
        hardware: the device to predict for: a `Hardware`, a card's name such as ``"h100"``, ``"cpu"``, or None for the
            model's device.
        accumulate: forward and backward passes for each optimizer step.
        keeps_output: whether the model's output, such as all logits of a language model, lives until the next output
            takes its place, as ``output = model(x)`` has it in a loop. False is for a loop that lets go of the output
            before backward, as ``loss(model(x)).backward()`` and the Trainer of transformers do, which takes less.
        probe: run each kernel for real, on the device and on inputs like those of the step, to see what memory it takes
            inside and, on a CPU, how long it takes; Python between the operators is timed as the simulation runs it.
            Otherwise memory is known by formulas (CUDA), or asked of the kernels that take much (CPU), and time by the
            speeds of `hardware`. Answers of CPU kernels are kept in a cache on disk.
        parallel: the step is one process's of several that train this model, under ``"fsdp2"`` (the repeated blocks and
            the root sharded, as `fully_shard` does by default) or ``"ddp"``; the batch is this process's. None for a
            model that is trained as it is, distributed already or not.
        world: how many processes, with `parallel`.
        shard: patterns of the modules that ``"fsdp2"`` shards each on its own, beside the root; None is the repeated
            blocks.
        tensor: over how many of the processes, next to each other, each layer's weights are split besides, by what the
            model's ``tp_plan`` says (models of transformers have one; the names of its styles are theirs). FSDP2 then
            shards over every `tensor`-th process, and the batch is that of such a group. None is 1.
        record: keep the profile in the history. None does where ``$MEMSCALE_HISTORY`` names its file, False does not,
            True asks for the variable, and a path is another file. A history that cannot be written is logged.

    Raises:
        ConfigError: an argument is wrong, or does not fit the others; the message says which.
        RuntimeUnavailable: the step can be neither simulated nor run here.
    """
    path = history_path(record)
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
    ).on(batch)
    applied = check_plan(step, plan)
    target = Target.of(hardware_for(model, hardware), probe=probe)
    found = profile_of(step, applied, target, Config())
    if path is not None:
        _keep(found, path, step, None if plan is None else applied)
    return found


@counted("plan")
def plan(
    model: nn.Module,
    batch: Any,
    budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    config: Config | None = None,
    exact: bool = True,
    hardware: Hardware | str | None = None,
    accumulate: int = 1,
    keeps_output: bool = True,
    stepping: Collection[str | Transform] = (),
    seconds: float | None = None,
    progress: Progress | None = None,
    parallel: ParallelKind | None = None,
    world: int | None = None,
    shard: Iterable[str] | str | None = None,
    tensor: int | None = None,
    record: Record = None,
) -> ProvenPlan:
    """The fastest composition of transforms whose training step fits `budget`, proved by simulation.

    Candidates for each part of the model (its repeated blocks, their large children, stages, the loss head) are
    simulated, a solver chooses among them, and the step that the choice makes is simulated as a whole: only what then
    fits is returned. Nothing is run, and nothing is changed.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    >>> model, batch = nn.Sequential(*blocks), torch.ones(1024, 64)
    >>> step = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu"}
    >>> plan = ms.plan(model, batch, budget="7MiB", **step)
    >>> plan.evidence.plain.taken_bytes > 7 * 2**20 >= plan.evidence.planned.taken_bytes
    True
    >>> fit = ms.transform(model, plan)

    Args:
        model: a module on any device; ``meta`` costs no memory.
        batch, optimizer, loss, accumulate, keeps_output: as in `memscale.profile`.
        budget: what the step may take of the device, everything that it holds counted: bytes as an int, ``"6GiB"`` or
            ``"6GB"``, or a share of ``hardware.usable_bytes`` as a float in (0, 1].
        config: which transforms may be used; None is all that change no bit: the numbers are the model's own.
        exact: False lets the plan use `tile` too, whose sums are in another order: less memory, and numbers that differ
            by roundings. A `config` that sets ``enable_tiling``, or its mode, decides by itself.
        hardware: the device to plan for: a `Hardware`, a card's name, ``"cpu"``, or None for the model's device. One
            that does not say how fast it is gets nominal speeds; ``Hardware.measure()`` finds the real ones.
        stepping: what the plan may do with the optimizer: any of ``"step_in_groups"``, ``"offload_states"``,
            ``"quantize_states"`` (not exact) and ``"step_in_backward"``, or such a transform with options of its own,
            as ``step_in_backward(max_norm=1.0)`` for a loop of two passes. ``Config(use_8bit_optimizer=True)`` allows
            the third by itself. Such a plan is applied with ``transform(model, plan, optimizer=optimizer)``.
        seconds: how long to look for a faster plan; then, or after Ctrl-C, the fastest of those that were tried is
            returned, and a note in its evidence says so. None looks to the end, and the same plan comes every time.
        progress: called before each simulation with what it is about, how many are done, and None.
        parallel, world, shard, tensor: as in `memscale.profile`: the step is one process's of several, and the plan is
            the same for all of them. Apply it to the plain model, then distribute what `transform` returns.
        record: keep the step with the plan in the history, as in `memscale.profile`; it is simulated once more for it.

    Raises:
        BudgetError: no composition fits; the error has the smallest peak that can be reached, and its plan.
        ConfigError: an argument is wrong, or the step cannot be simulated; the message says what to do.
    """
    path = history_path(record)
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
    ).on(batch)
    engine = DecisionEngine.of_step(
        step, config=allowed(config, exact=exact), hardware=hardware, stepping=stepping, progress=progress
    )
    found = engine.plan(budget, seconds=seconds)
    if path is not None:
        _keep(engine.steps.profile(found), path, step, found, config)
    return found


def frontier(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    config: Config | None = None,
    exact: bool = True,
    hardware: Hardware | str | None = None,
    accumulate: int = 1,
    keeps_output: bool = True,
    points: int = POINTS,
    stepping: Collection[str | Transform] = (),
    progress: Progress | None = None,
    parallel: ParallelKind | None = None,
    world: int | None = None,
    shard: Iterable[str] | str | None = None,
    tensor: int | None = None,
) -> Frontier:
    """What memory costs in time: plans from the smallest peak that can be reached to the step as it is.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    >>> curve = ms.frontier(nn.Sequential(*blocks), torch.ones(1024, 64), loss=lambda y, _: y.square().mean())
    >>> [point.peak_bytes for point in curve] == sorted(point.peak_bytes for point in curve)
    True
    >>> curve[-1].plan
    Plan()

    Args:
        model, batch, optimizer, loss, config, exact, hardware, accumulate, keeps_output, stepping: as in `plan`.
        progress: as in `plan`.
        parallel, world, shard, tensor: as in `plan`.
        points: how many budgets to plan for, evenly spaced; fewer points come back where several have the same plan.

    Raises:
        ConfigError: as in `plan`.
    """
    check_model(model, "frontier")
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
        caller="frontier",
    ).on(batch)
    engine = DecisionEngine.of_step(
        step, config=allowed(config, exact=exact), hardware=hardware, stepping=stepping, progress=progress
    )
    return engine.frontier(points)


def _keep(profile: Profile, path: str, step: TrainingStep, plan: Plan | None, config: Config | None = None) -> None:
    from memscale import history  # a database, and what draws its runs: loaded when something is recorded

    spec = step.parallel
    history.keep(
        profile,
        path,
        step.model,
        step.batch,
        plan=plan,
        optimizer=step.optimizer,
        config=config,
        # As runs are told apart by it: those of before the default are of the other loop.
        loop="keeps_output" if step.loop.keeps_output and step.module is not None else None,
        accumulate=step.loop.accumulate,
        parallel=None if spec is None else spec.kind,
        world=None if spec is None else spec.world,
    )
