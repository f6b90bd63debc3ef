"""`OOMPredictor`: predicts whether a step fits on a device, which changes help, and how large its batch can be."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale.algebra import PlanLike
from memscale.config import Config, check_config
from memscale.core import BudgetError, ConfigError, Loss, MemscaleError, budget_bytes, format_unlike, tensors
from memscale.hardware import Hardware
from memscale.planning.engine import Budget
from memscale.planning.prediction.grid import SizeGrid, fitting_grid
from memscale.planning.prediction.largest import MOST_SIMULATIONS, LargestBatch, largest_fitting
from memscale.planning.prediction.predicted_step import PredictedStep
from memscale.planning.prediction.prediction import OOMPrediction, OOMRisk
from memscale.planning.prediction.recommending import recommending
from memscale.planning.prediction.sizes import Sizes, check_range
from memscale.planning.step_simulator import Progress
from memscale.simulation import ParallelKind, Target, TrainingStep, check_plan, hardware_for
from memscale.telemetry import counted


class OOMPredictor:
    """Predicts whether training steps of one model fit on a device, by simulation; see `memscale.profile`.

    A step fits if its peak is at most ``hardware.usable_bytes``. The peak is the most that PyTorch's caching allocator
    reserves over the first step and a later one; on a CPU, which has no caching allocator, the most bytes allocated at
    once. Model, optimizer, gradients and random states are unchanged after each call, also after an error.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    >>> box = ms.Hardware(name="box", device_type="cpu", memory_bytes=8 * 2**20)
    >>> predictor = ms.OOMPredictor(nn.Sequential(*blocks), loss=lambda y, _: y.square().mean(), hardware=box)
    >>> prediction = predictor.predict(torch.ones(1024, 64))
    >>> print(prediction.message)
    the step, without an optimizer, does not fit: its peak of 11.1 MiB is 3.07 MiB above the 8.00 MiB of box
    >>> any(each.plan and each.peak_bytes <= prediction.capacity_bytes for each in prediction.recommendations)
    True
    >>> print(predictor.largest(lambda rows: torch.ones(rows, 64)))
    724 fits and leaves 8.74 KiB of the 8.00 MiB; 725 would take 1.76 KiB too much (sizes simulated: 8)

    Args:
        model: a module on any device; ``meta`` costs no memory.
        optimizer, loss, hardware, keeps_output, probe, parallel, world, shard, tensor: as in `memscale.profile`.
        plan: transforms that the step has already; a recommended plan replaces this plan.
        accumulate: forward and backward passes for each optimizer step.
        config: ``use_empirical_fallback`` and ``warmup_steps`` as in `MemoryProfiler`, and the transforms that a
            recommended plan may use; None allows all transforms that change no bit.
        progress: called before each simulation with its subject, the number of simulations done, and the total (None
            if the total is unknown).

    Raises:
        ConfigError: an argument is wrong, or contradicts another one; the message names the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hardware: Hardware | str | None = None,
        loss: Loss | None = None,
        plan: PlanLike | None = None,
        accumulate: int = 1,
        keeps_output: bool = True,
        config: Config | None = None,
        probe: bool = False,
        progress: Progress | None = None,
        parallel: ParallelKind | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"OOMPredictor(model=...) takes a torch.nn.Module, got {type(model).__name__}; for a function that "
                "runs one step, compare memscale.profile(function).peak_bytes with the device's memory"
            )
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
            caller="OOMPredictor",
        )
        check_config(config)
        applied = check_plan(step, plan)
        self.hardware = hardware_for(model, hardware)
        target = Target.of(self.hardware, probe=probe)
        self._step = PredictedStep(step, applied, config or Config(), config, target, progress)

    @counted("predict")
    def predict(
        self, batch: Any, *, budget: Budget | None = None, recommend: bool | None = None, seconds: float | None = None
    ) -> OOMPrediction:
        """Returns the prediction for a step with this batch, with recommendations if the risk is above LOW.

        Every recommended change was simulated like the step itself, and lowers the peak. The changes, in the order of
        the search:

        - the repeated blocks checkpointed; if that alone does not fit, with more FSDP2 shards, a fused update or
          `step_in_backward`,
        - the other loops (``fused``, ``foreach``) of a ``torch.optim`` optimizer,
        - `cast` to bfloat16, or to float16 on a device without bfloat16,
        - the batch in 2, 4, 8, ... parts whose gradients are accumulated,
        - the plan that `memscale.plan` finds for the capacity (the smallest plan where none fits); if that alone does
          not fit, also with another loop of the optimizer or with accumulated parts.

        Interrupted from the keyboard, the prediction has the changes found until then.

        Args:
            batch: the arguments of the model: a tensor is one positional argument, a tuple or list the positional
                arguments, a mapping the keyword arguments.
            budget: the most that the step may take, if less than the device has: bytes as an int, ``"6GiB"`` or
                ``"6GB"``, or a share of ``hardware.usable_bytes`` as a float in (0, 1].
            recommend: whether to search for recommendations, which takes as long as `memscale.plan`. None searches
                if the risk is above ``OOMRisk.LOW``.
            seconds: the time limit of that search; None for no limit, so that the result is deterministic.

        Raises:
            ConfigError: the batch does not fit the model, or another argument is wrong.
            RuntimeUnavailable: the step can be neither simulated nor run on this machine.
        """
        capacity_bytes = self._capacity_bytes(budget)
        self._step.reported = 0
        self._step.next("the step as written", None if recommend is not False else 1)
        profile = self._step.profile(batch, capacity_bytes)
        prediction = OOMPrediction(profile, capacity_bytes)
        wanted = prediction.risk > OOMRisk.LOW if recommend is None else recommend
        return self.recommended(prediction, batch, seconds=seconds) if wanted else prediction

    def recommended(self, prediction: OOMPrediction, batch: Any, *, seconds: float | None = None) -> OOMPrediction:
        """Returns `prediction` with recommendations, for callers that show the verdict before the search for them.

        Args:
            prediction: a prediction of `predict` for `batch`, without recommendations.
            batch, seconds: as in `predict`.
        """
        return recommending(self._step, prediction, batch, seconds)

    def predict_steps(self, batches: Sequence[Any], *, budget: Budget | None = None) -> OOMPrediction:
        """Returns the prediction for consecutive steps with batches of different sizes, such as texts or images.

        The prediction is that of the largest batch, except for the reserved bytes of a CUDA device, which are the most
        over all steps: cached blocks of one batch may be of no use for the next. A note has both figures.

        >>> import torch, memscale as ms
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
        >>> predictor = ms.OOMPredictor(model, loss=lambda y, _: y.square().mean(), hardware="t4")
        >>> batches = [torch.empty(rows, 512, device="meta") for rows in (900, 2000, 1400, 1900)]
        >>> predictor.predict_steps(batches).peak_bytes > predictor.predict(batches[1]).peak_bytes
        True

        Args:
            batches: in the order of training; each as in `predict`.
            budget: as in `predict`.

        Raises:
            ConfigError: `batches` is empty, a batch does not fit the model, or another argument is wrong.
            RuntimeUnavailable: a step can be neither simulated nor run on this machine.
        """
        if isinstance(batches, (torch.Tensor, Mapping)):
            raise ConfigError(
                f"predict_steps(batches) takes a list of batches, got a {type(batches).__name__}; write [batch, ...]"
            )
        batches = list(batches)
        if not batches:
            raise ConfigError("predict_steps(batches=[]) needs at least one batch")
        largest = max(reversed(batches), key=lambda batch: sum(leaf.numel() for leaf in tensors(batch)))
        alone = self.predict(largest, budget=budget, recommend=False)
        if alone.profile.reserved_peak_bytes is None:
            return alone
        self._step.next(f"{len(batches)} steps", None)
        reserved = self._step.reserved_over(batches, alone.capacity_bytes)
        assert reserved is not None, "the device has an allocator"
        over_all, over_one = format_unlike(reserved, alone.profile.reserved_peak_bytes)
        note = (
            f"over {len(batches)} steps the allocator reserves {over_all}, and with the largest batch alone {over_one}"
        )
        if reserved > alone.profile.reserved_peak_bytes:
            note += " (PYTORCH_ALLOC_CONF=expandable_segments:True, here too, lets other sizes have the same memory)"
        profile = dataclasses.replace(alone.profile, reserved_peak_bytes=reserved)
        return dataclasses.replace(alone, profile=profile, notes=(*alone.notes, note))

    def largest(
        self,
        batch_fn: Callable[[int], Any],
        *,
        budget: Budget | None = None,
        at_least: int = 1,
        at_most: int = 2**20,
    ) -> LargestBatch:
        """Returns the largest n such that a step with ``batch_fn(n)`` fits: a batch size or a sequence length.

        The search simulates at most 12 sizes, guided by a polynomial through their peaks. The answer is proven by
        simulation: n fits, and ``n + 1`` does not. Interrupted from the keyboard, the result is the largest size found
        to fit until then.

        Args:
            batch_fn: returns the batch of size n, on any device. The search may ask for sizes up to 16 times the
                answer: tensors on ``meta`` take no memory.
            budget: as in `predict`.
            at_least, at_most: the range of sizes, both inclusive, such as 1 and the number of positions of the model.

        Raises:
            BudgetError: not even ``at_least`` fits; the message has its peak.
            ConfigError: ``batch_fn`` does not scale (``batch_fn`` raises, its batch does not depend on n, the model
                does not take its batch), or another argument is wrong.
        """
        check_range("largest", at_least, at_most)
        capacity_bytes = self._capacity_bytes(budget)
        found = _Peaks(self, batch_fn, at_least, capacity_bytes)
        n: int | None
        try:
            n, peaks = largest_fitting(
                found.peak_bytes, capacity_bytes, at_least=at_least, at_most=at_most, most=MOST_SIMULATIONS
            )
            interrupted = False
        except KeyboardInterrupt:
            peaks, interrupted = found.peaks, True
            n = max((size for size, nbytes in peaks.items() if nbytes <= capacity_bytes), default=None)
            if n is None:
                raise
        if n is None:
            takes, capacity = format_unlike(peaks[at_least], capacity_bytes)
            raise BudgetError(
                f"not even batch_fn({at_least}) fits: its step takes {takes} ({peaks[at_least]} bytes) of {capacity}; "
                f"predict() says what would free memory"
            )
        if n == at_most > at_least and peaks[n] == peaks[at_least] and found.sizes.only_values_differ(n):
            raise ConfigError(
                f"batch_fn does not scale: the peak is {peaks[n]} bytes at n={at_least} as at n={n}, with tensors of "
                "the same shapes; return a batch that grows with n"
            )
        too_large = min((size for size, nbytes in peaks.items() if nbytes > capacity_bytes), default=None)
        return LargestBatch(n, peaks[n], peaks.get(n + 1), capacity_bytes, len(peaks), too_large, interrupted)

    def grid(
        self,
        batch_fn: Callable[[int, int], Any],
        *,
        batches: Sequence[int],
        lengths: Sequence[int],
        budget: Budget | None = None,
    ) -> SizeGrid:
        """Returns the table of batch sizes by sequence lengths that fit.

        Simulated are the pairs at the border between fitting and not fitting, see `SizeGrid`.

        >>> import torch, memscale as ms
        >>> box = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**20)
        >>> predictor = ms.OOMPredictor(torch.nn.Linear(64, 64), loss=lambda y, _: y.mean(), hardware=box)
        >>> print(predictor.grid(lambda b, s: torch.ones(b, s, 64), batches=(1, 4, 16), lengths=(128, 512)))
        fits in 1.00 MiB, batch by sequence length; peaks as simulated
                    128       512
        1           yes   417 KiB
        4       417 KiB  1.53 MiB
        16     1.53 MiB        no

        Args:
            batch_fn: returns the batch of a batch size and a length; tensors on ``meta`` take no memory.
            batches, lengths: the sizes, ascending.
            budget: as in `predict`.

        Raises:
            ConfigError: a list of sizes is empty or not ascending, or a batch does not fit the model.
        """
        for name, sizes in (("batches", batches), ("lengths", lengths)):
            if not sizes or sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
                raise ConfigError(f"grid({name}={sizes!r}) must be sizes of at least 1, ascending, such as (1, 2, 4)")
        capacity_bytes = self._capacity_bytes(budget)
        most, done = len(batches) + len(lengths) - 1, itertools.count()

        def peak_bytes(batch: int, length: int) -> int:
            self._step.say(f"{batch} x {length}", next(done), most)
            return self._step.profile(batch_fn(batch, length), capacity_bytes).taken_bytes

        return fitting_grid(peak_bytes, capacity_bytes, batches=batches, lengths=lengths)

    def _capacity_bytes(self, budget: Budget | None) -> int:
        usable_bytes = self.hardware.usable_bytes
        return usable_bytes if budget is None else min(usable_bytes, budget_bytes(budget, usable_bytes))


class _Peaks:
    """The simulated peaks of a batch factory's batches, by size."""

    def __init__(
        self, predictor: OOMPredictor, batch_fn: Callable[[int], Any], at_least: int, capacity_bytes: int
    ) -> None:
        self.predictor = predictor
        self.sizes = Sizes(batch_fn, at_least, "largest")
        self.capacity_bytes = capacity_bytes
        self.peaks: dict[int, int] = {}

    def peak_bytes(self, n: int) -> int:
        """Returns the peak in bytes of the step with the batch of size `n`.

        Raises:
            ConfigError: as `Sizes.batch`, or the model does not take the batch.
        """
        self.predictor._step.say(f"size {n}", len(self.sizes.parts), None)
        batch = self.sizes.batch(n)
        try:
            profile = self.predictor._step.profile(batch, self.capacity_bytes)
        except MemscaleError as error:
            if n == self.sizes.at_least:
                raise
            raise self.sizes.fault(n, f"the step does not run with batch_fn({n}): {error};") from error
        self.peaks[n] = profile.taken_bytes
        return self.peaks[n]
