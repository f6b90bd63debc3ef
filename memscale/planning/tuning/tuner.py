"""`AutoTuner`: finds the best size of a batch, and the plan for a step of that size, by simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import torch
from torch import nn

from memscale.algebra import Transform
from memscale.config import Config, check_config
from memscale.core import BudgetError, ConfigError, Loss, budget_bytes, format_unlike
from memscale.hardware import Hardware
from memscale.planning.engine import LEFT_FREE, Budget, check_model
from memscale.planning.prediction.sizes import BatchFn, Sizes, check_range
from memscale.planning.step_simulator import OutOfTime, Progress, limited
from memscale.planning.stepping import checked
from memscale.planning.tuning.confirmation import confirmed
from memscale.planning.tuning.size_search import Count, ModelStep, SizeSearch
from memscale.planning.tuning.tuning import Confirmation, Tuning
from memscale.simulation import Parallel, ParallelKind, TrainingStep, hardware_for

_OBJECTIVES = ("throughput", "batch", "sequence")
# The default of `at_most`. By choice.
_MOST = 2**20
# The most searches, each with a smaller limit than the one before; tuning fails if every result exceeds the budget. By
# choice.
_CONFIRMATIONS = 3


class AutoTuner:
    """Finds the best batch size for a model, and the plan for a step of that size, without running out of memory.

    Steps are simulated, as in `memscale.plan`; at the end real steps confirm the result if the model is on the device.
    Model, optimizer, gradients and random states are unchanged afterwards, also after an error.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    >>> model = nn.Sequential(*blocks)
    >>> box = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**34)
    >>> tuner = ms.AutoTuner(model, loss=lambda y, _: y.square().mean(), hardware=box)
    >>> best = tuner.tune(lambda n: torch.ones(512 * n, 64), objective="batch", budget="3MiB", at_most=2)
    >>> best.plan.evidence.planned.taken_bytes <= 3 * 2**20 < best.plan.evidence.plain.taken_bytes
    True
    >>> fit = ms.transform(model, best.plan)

    Args:
        model: a module on any device, not transformed; ``meta`` costs no memory.
        optimizer, loss, config, hardware, accumulate, keeps_output, stepping: as in `memscale.plan`.
        progress: called before each simulation with its subject, the number of simulations done, and None.
        parallel, world, shard, tensor: as in `memscale.profile`; a size is the size of one process's batch.

    Raises:
        ConfigError: an argument is wrong, or contradicts another one; the message names the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss: Loss | None = None,
        config: Config | None = None,
        hardware: Hardware | str | None = None,
        accumulate: int = 1,
        keeps_output: bool = True,
        stepping: Collection[str | Transform] = (),
        progress: Progress | None = None,
        parallel: ParallelKind | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        check_model(model, "AutoTuner")
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
            caller="AutoTuner",
        )
        check_config(config)
        checked(stepping)
        self.hardware = hardware_for(model, hardware)
        self._step = ModelStep(step, config, self.hardware, stepping)
        self._progress = progress

    def tune(
        self,
        batch_fn: BatchFn,
        *,
        objective: str = "throughput",
        budget: Budget | None = None,
        at_least: int = 1,
        at_most: int = _MOST,
        count: Count | None = None,
        confirm: bool = True,
        seconds: float | None = None,
    ) -> Tuning:
        """Returns the best size, and the fastest plan under which a step of this size fits into the budget.

        A search that is stopped, from the keyboard or after `seconds`, returns the best size found until then.

        Args:
            batch_fn: returns the batch of a size, on any device; tensors on ``meta`` take no memory. For the objective
                ``"sequence"`` the size is the length of the batch's rows.
            objective: ``"throughput"`` for the size with the highest rate, each size under its fastest plan;
                ``"batch"`` or ``"sequence"`` for the largest size that fits under any plan.
            budget: the most that a step may take, as in `memscale.plan`; None leaves 5 % of the device free.
            at_least, at_most: the range of sizes, both inclusive, such as 1 and the number of positions of the model.
            count: returns the count of a batch for the rate, an int of at least 1. None counts the size, and for
                ``"sequence"`` the tokens, which are the elements of the batch's first integer tensor.
            confirm: whether to run two real steps under the plan at the end, if the model is on the device. The changes
                of these steps are undone. If a real step takes more than the budget, the search repeats with a limit
                that is smaller by the difference.
            seconds: the time limit of the search; None for no limit.

        Raises:
            BudgetError: no plan fits even ``at_least`` (the error has the smallest peak within reach), or real steps
                take more than the budget in every round.
            ConfigError: ``batch_fn`` does not scale (``batch_fn`` raises, its batch does not depend on the size, the
                model does not take its batch), or another argument is wrong.
        """
        if objective not in _OBJECTIVES:
            raise ConfigError(f"tune(objective={objective!r}) must be one of {', '.join(map(repr, _OBJECTIVES))}")
        check_range("tune", at_least, at_most)
        if count is not None and not callable(count):
            raise ConfigError(f"tune(count={count!r}) must be a function from a batch to a number, or None")
        usable_bytes = self.hardware.usable_bytes
        limit = min(usable_bytes, budget_bytes(1 - LEFT_FREE if budget is None else budget, usable_bytes))
        progress = limited(self._progress, seconds)

        def say(what: str, done: int) -> None:
            if progress is not None:
                progress(what, done, None)

        search = SizeSearch(self._step, say, batch_fn, objective, limit, at_least, at_most, count)
        found = search.best()
        rounds = 0
        while confirm and not found.interrupted:
            try:
                say(f"size {found.size}: a real step", found.simulations)
                real, note = self._confirmed(search.sizes, found)
            except OutOfTime:
                continue  # the time limit stops simulations, not the real step: `say` raises only once
            except KeyboardInterrupt:
                return dataclasses.replace(found, interrupted=True, complete=False)
            if real is None:
                return dataclasses.replace(found, budget_bytes=limit, notes=(*found.notes, note))
            if real.peak_bytes <= limit:
                return dataclasses.replace(found, budget_bytes=limit, confirmation=real)
            less = search.limit - real.peak_bytes + min(limit, found.plan.evidence.planned.peak_bytes)
            takes, allowed, said = format_unlike(real.peak_bytes, limit, found.plan.evidence.planned.peak_bytes)
            fault = BudgetError(
                f"a real step with batch_fn({found.size}) takes {takes}, and {allowed} are allowed; it was "
                f"simulated to take {said}. Give a smaller budget, or confirm=False for the simulated result"
            )
            rounds += 1
            if rounds == _CONFIRMATIONS or less < 1:
                raise fault
            search = dataclasses.replace(search, limit=less)
            try:
                found = search.best()
            except BudgetError as error:
                raise fault from error
        return dataclasses.replace(found, budget_bytes=limit)

    def _confirmed(self, sizes: Sizes, found: Tuning) -> tuple[Confirmation | None, str]:
        step = self._step.step
        # A real step of one process would wait forever for collectives of the other processes.
        if (spec := step.parallel or Parallel.of_distributed(step.model)) is not None:
            return None, f"simulated only: the step is of one process of several ({spec})"
        return confirmed(step, sizes.batch(found.size), found.plan, self.hardware)
