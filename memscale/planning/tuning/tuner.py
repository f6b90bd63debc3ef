"""`AutoTuner`: the best size of a batch and the plan that it needs, by simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from memscale.config import Config, check_config
from memscale.core import BudgetError, ConfigError, Loss, budget_bytes, format_unlike
from memscale.hardware import Hardware
from memscale.planning.engine import LEFT_FREE, Budget, check_model
from memscale.planning.prediction.sizes import BatchFn, Sizes, check_range
from memscale.planning.step_simulator import OutOfTime, Progress, limited
from memscale.planning.tuning.confirmation import confirmed
from memscale.planning.tuning.size_search import Count, ModelStep, SizeSearch
from memscale.planning.tuning.tuning import Confirmation, Tuning
from memscale.simulation import Parallel, ParallelKind, TrainingStep, hardware_for

_OBJECTIVES = ("throughput", "batch", "sequence")
_MOST = 2**20  # the largest size that is looked at unless told
# Real steps that are tried before a simulation that they contradict is given up.
_CONFIRMATIONS = 3


class AutoTuner:
    """Finds the best batch for a model and the plan that it needs, without ever running out of memory.

    Steps are simulated, as in `memscale.plan`; at the end one real step confirms the result where the device is there.
    Nothing is changed: model, optimizer, gradients and random states are as before, also after an error.

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
        optimizer, loss, config, hardware, accumulate, keeps_output: as in `memscale.plan`.
        progress: called before each simulation with what it is about, how many are done, and None.
        parallel, world, shard, tensor: as in `memscale.profile`; sizes are those of one process's batch.

    Raises:
        ConfigError: an argument is wrong, or does not fit the others; the message says which.
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
        self.hardware = hardware_for(model, hardware)
        self._step = ModelStep(step, config, self.hardware)
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
        """The best size, and the fastest plan that fits it into the budget.

        Interrupted from the keyboard, or after so many seconds, it returns the best that was found until then.

        Args:
            batch_fn: returns the batch of a size, on any device; tensors on ``meta`` cost nothing. For the objective
                ``"sequence"`` the size is the length of its rows.
            objective: ``"throughput"`` for the size that gets through most in a second, under the plan that each size
                needs; ``"batch"`` or ``"sequence"`` for the largest size that any plan fits.
            budget: what a step may take of the device, as in `memscale.plan`; None leaves a twentieth of it free.
            at_least, at_most: the sizes between which to look, such as 1 and the most positions of the model.
            count: what a batch is worth, for the rate; None counts its size, and for ``"sequence"`` its tokens: the
                elements of its first tensor of integers.
            confirm: whether to run two real steps under the plan at the end, if model and device are there. What the
                steps change is put back. If they take more than the budget, it is tuned again for so much less.
            seconds: how long to look; None for as long as it takes.

        Raises:
            BudgetError: no plan fits even ``at_least``; the error has the smallest peak that can be reached.
            ConfigError: ``batch_fn`` does not scale (it raises, its batch does not depend on the size, the model does
                not take its batch), or another argument is wrong.
        """
        if objective not in _OBJECTIVES:
            raise ConfigError(f"tune(objective={objective!r}) must be one of {', '.join(map(repr, _OBJECTIVES))}")
        check_range("tune", at_least, at_most)
        if count is not None and not callable(count):
            raise ConfigError(f"tune(count={count!r}) must be a function from a batch to a number, or None")
        usable_bytes = self.hardware.usable_bytes
        limit = min(usable_bytes, budget_bytes(1 - LEFT_FREE if budget is None else budget, usable_bytes))
        told = limited(self._progress, seconds)

        def say(what: str, done: int) -> None:
            if told is not None:
                told(what, done, None)

        search = SizeSearch(self._step, say, batch_fn, objective, limit, at_least, at_most, count)
        found = search.best()
        rounds = 0
        while confirm and not found.interrupted:
            try:
                say(f"size {found.size}: a real step", found.simulations)
                real, note = self._confirmed(search.sizes, found)
            except OutOfTime:
                continue  # the real step is what was waited for
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
                f"simulated to take {said}. Give a smaller budget, or confirm=False for what simulation finds"
            )
            rounds += 1
            if rounds == _CONFIRMATIONS or less < 1:
                raise fault
            search = search.within(less)
            try:
                found = search.best()
            except BudgetError as error:
                raise fault from error
        return dataclasses.replace(found, budget_bytes=limit)

    def _confirmed(self, sizes: Sizes, found: Tuning) -> tuple[Confirmation | None, str]:
        step = self._step.step
        # One process alone would wait for the others, which are not asked to step.
        if (spec := step.parallel or Parallel.of_distributed(step.model)) is not None:
            return None, f"not confirmed by a real step: it is one process's of several ({spec})"
        return confirmed(step, sizes.batch(found.size), found.plan, self.hardware)
