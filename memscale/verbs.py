"""`profile`, `plan` and `frontier`: functions that make a planning engine per call."""

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

_USUAL = Config()


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
    """Returns the memory of a training step by simulation: in seconds, on a laptop, for a model of any size.

    Forward, loss, backward, optimizer step and the dropping of gradients run twice without their kernels, and the
    simulation records the lifetime and size of each tensor. Model, optimizer, gradients and random states do not
    change, also after an error.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> profile = ms.profile(model, torch.ones(32, 64), optimizer=optimizer, loss=lambda y, _: y.square().mean())
    >>> profile.peak_bytes, profile.moment.phase
    (439456, 'optimizer')
    >>> profile.by_category["optimizer state"] == 2 * profile.by_category["parameter"] + 4 * 4  # and four step counts
    True

    Args:
        model: a module on any device (``meta`` costs no memory), or a function without arguments that is one pass of a
            training loop; its modules, optimizers and tensors are found automatically.
        batch: the model's arguments: a tensor is one positional argument, a tuple or list the positional arguments, a
            mapping the keyword arguments. `None` for a function.
        optimizer: the optimizer of the model; `None` ends the step after backward.
        loss: ``loss(output, batch)``, a scalar tensor. `None` uses the output's ``loss``, or the output if it is a
            tensor.
        plan: transforms to apply first, as in `transform`; the model itself does not change.
        hardware: the device to predict for: a `Hardware`, a card's name such as ``"h100"``, ``"cpu"``, or `None` for
            the model's device.
        accumulate: forward and backward passes for each optimizer step.
        keeps_output: whether the loop keeps the model's output, such as all logits, until the next forward, as
            ``output = model(x)`` in a loop does. `False` is for a loop that drops the output before backward, as
            ``loss(model(x)).backward()`` and the Trainer of transformers do, which takes less memory.
        probe: run each kernel on the device, with inputs of the step's shapes, to measure its scratch memory, and on a
            CPU each distinct part of the step, to measure its seconds. Beside other busy programs no seconds are
            measured, and a note says so. `False` computes scratch memory by formulas (CUDA) or measures it for large
            kernels (CPU), and times from the speeds of `hardware`. Measurements on a CPU are cached on disk.
        parallel: ``"fsdp2"`` (the repeated blocks and the root sharded, as `fully_shard` does by default) or ``"ddp"``:
            the step is that of one of several processes, and the batch is that process's. `None` simulates the model
            as given, distributed already or not.
        world: the number of processes, with `parallel`.
        shard: patterns of the modules that ``"fsdp2"`` shards as units of their own besides the root; `None` is the
            repeated blocks.
        tensor: the number of neighbouring processes over which tensor parallelism splits each layer's weights, by the
            model's ``tp_plan`` (models of transformers have one). FSDP2 then shards over every `tensor`-th process, and
            the batch is that of such a group. `None` is 1.
        record: whether to store the profile in the run history. `None` stores it if ``$MEMSCALE_HISTORY`` names a file,
            `False` never does, `True` requires the variable, and a path is the file. A failed write is logged.

    Raises:
        ConfigError: an argument is wrong, or does not fit the others; the message says which.
        RuntimeUnavailable: the step can be neither simulated nor run on this machine.
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
    found = profile_of(step, applied, target, _USUAL)
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
    """Returns the plan of the fastest training step that fits `budget`, proved by simulation.

    `plan` simulates candidates for each part of the model (repeated blocks, their large children, stages, the loss
    head), a solver chooses among them, and the whole step is simulated with the choice. Only a plan whose simulated
    step fits is returned. The model does not run, and nothing changes.

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
        budget: the device memory for the step, with everything that it holds: bytes as an int, ``"6GiB"`` or
            ``"6GB"``, or a share of ``hardware.usable_bytes`` as a float in (0, 1].
        config: the allowed transforms; `None` allows all that change no bit of the model's numbers.
        exact: `False` also allows `tile`, which takes less memory and changes the order of sums, so that numbers differ
            by rounding. A `config` that sets ``enable_tiling`` or its mode takes precedence.
        hardware: the device to plan for: a `Hardware`, a card's name, ``"cpu"``, or `None` for the model's device. A
            device without known speeds gets default speeds; ``Hardware.measure()`` finds the real ones.
        stepping: the optimizer transforms that the plan may use: any of ``"step_in_groups"``, ``"offload_states"``,
            ``"quantize_states"`` (not exact) and ``"step_in_backward"``, or such a transform with options, as
            ``step_in_backward(max_norm=1.0)`` for a loop of two passes. ``Config(use_8bit_optimizer=True)`` allows
            ``"quantize_states"`` too. Apply such a plan with ``transform(model, plan, optimizer=optimizer)``.
        seconds: the time limit of the search; after it, or after Ctrl-C, the fastest plan so far is returned, with a
            note in its evidence. `None` completes the search, which finds the same plan every time.
        progress: called before each simulation with its description, the number of finished simulations, and `None`.
        parallel, world, shard, tensor: as in `memscale.profile`: the step is that of one of several processes, which
            all use this plan. Apply it to the plain model, then distribute the result of `transform`.
        record: whether to store the step with the plan in the run history, as in `memscale.profile`, which simulates it
            once more.

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
    seconds: float | None = None,
    progress: Progress | None = None,
    parallel: ParallelKind | None = None,
    world: int | None = None,
    shard: Iterable[str] | str | None = None,
    tensor: int | None = None,
) -> Frontier:
    """Returns plans for a range of budgets, from the smallest peak that can be reached to the step without a plan.

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
        seconds: the time limit of the search; after it, or after Ctrl-C, the curve of the plans that were simulated
            until then is returned, with a note in each.
        progress: as in `plan`.
        parallel, world, shard, tensor: as in `plan`.
        points: the number of evenly spaced budgets; budgets with the same plan give one point.

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
    return engine.frontier(points, seconds=seconds)


def _keep(profile: Profile, path: str, step: TrainingStep, plan: Plan | None, config: Config | None = None) -> None:
    from memscale import history  # imported when a call is recorded, since it loads a database

    spec = step.parallel
    history.keep(
        profile,
        path,
        step.model,
        step.batch,
        plan=plan,
        optimizer=step.optimizer,
        config=config,
        # Part of the identity of a run: runs from before the default changed have the other loop.
        loop="keeps_output" if step.loop.keeps_output and step.module is not None else None,
        accumulate=step.loop.accumulate,
        parallel=None if spec is None else spec.kind,
        world=None if spec is None else spec.world,
    )
