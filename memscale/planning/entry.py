"""`plan` and `frontier`: the planner as functions, one engine for each call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from memscale.algebra import Transform
from memscale.config import Config
from memscale.core import Loss, Record, history_path
from memscale.hardware import Hardware
from memscale.planning.engine import POINTS, Budget, DecisionEngine
from memscale.planning.evidence.curve import Frontier
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.step_simulator import Progress
from memscale.simulation import Parallel
from memscale.telemetry import counted


@counted("plan")
def plan(
    model: nn.Module,
    batch: Any,
    *,
    budget: Budget,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    config: Config | None = None,
    hardware: Hardware | str | None = None,
    accumulate: int = 1,
    stepping: Collection[str | Transform] = (),
    progress: Progress | None = None,
    parallel: Parallel | None = None,
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
        batch, optimizer, loss, accumulate: as in `memscale.profile`.
        budget: what the step may take of the device, everything that it holds counted: bytes as an int, ``"6GiB"`` or
            ``"6GB"``, or a share of ``hardware.usable_bytes`` as a float in (0, 1].
        config: which transforms may be used; None is ``Config(mode="aggressive")``: all but `cast`, so the numbers are
            the model's own, bit for bit except that `tile` adds gradients in another order.
        hardware: the device to plan for: a `Hardware`, a card's name, ``"cpu"``, or None for the model's device. One
            that does not say how fast it is gets nominal speeds; ``Hardware.measure()`` finds the real ones.
        stepping: what the plan may do with the optimizer: any of ``"step_in_groups"``, ``"offload_states"``,
            ``"quantize_states"`` (not exact) and ``"step_in_backward"``, or such a transform with options of its own,
            as ``step_in_backward(max_norm=1.0)`` for a loop of two passes. ``Config(use_8bit_optimizer=True)`` allows
            the third by itself. Such a plan is applied with ``transform(model, plan, optimizer=optimizer)``.
        progress: called before each simulation with what it is about, how many are done, and None.
        parallel, world, shard, tensor: as in `memscale.profile`: the step is one process's of several, and the plan is
            the same for all of them. Apply it to the plain model, then distribute what `transform` returns.
        record: keep the step with the plan in the history, as in `memscale.profile`; it is simulated once more for it.

    Raises:
        BudgetError: no composition fits; the error has the smallest peak that can be reached, and its plan.
        ConfigError: an argument is wrong, or the step cannot be simulated; the message says what to do.
    """
    path = history_path(record)
    engine = DecisionEngine(
        model,
        batch,
        optimizer=optimizer,
        loss=loss,
        config=config,
        hardware=hardware,
        accumulate=accumulate,
        stepping=stepping,
        progress=progress,
        parallel=parallel,
        world=world,
        shard=shard,
        tensor=tensor,
    )
    found = engine.plan(budget)
    if path is not None:
        from memscale import history  # which stands above, and is loaded when something is recorded

        with_it = engine.steps.profile(found)
        options = {"accumulate": accumulate, "parallel": parallel, "world": world}
        history.keep(with_it, path, model, batch, plan=found, optimizer=optimizer, config=config, **options)
    return found


def frontier(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    config: Config | None = None,
    hardware: Hardware | str | None = None,
    accumulate: int = 1,
    points: int = POINTS,
    stepping: Collection[str | Transform] = (),
    progress: Progress | None = None,
    parallel: Parallel | None = None,
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
        model, batch, optimizer, loss, config, hardware, accumulate, stepping, progress: as in `plan`.
        parallel, world, shard, tensor: as in `plan`.
        points: how many budgets to plan for, evenly spaced; fewer points come back where several have the same plan.

    Raises:
        ConfigError: as in `plan`.
    """
    engine = DecisionEngine(
        model,
        batch,
        optimizer=optimizer,
        loss=loss,
        config=config,
        hardware=hardware,
        accumulate=accumulate,
        stepping=stepping,
        progress=progress,
        parallel=parallel,
        world=world,
        shard=shard,
        tensor=tensor,
    )
    return engine.frontier(points)
