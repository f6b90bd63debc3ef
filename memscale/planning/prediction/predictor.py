"""`OOMPredictor`: will this step fit on that device, what would make it fit, and how large can its batch be."""

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
    """Predicts whether training steps of one model fit on a device, by simulating them; see `memscale.profile`.

    The peak that counts is what PyTorch's caching allocator reserves, over the first step and a later one; on a CPU,
    which has no such allocator, what lives at once. It is held against ``hardware.usable_bytes``. Nothing is changed:
    model, optimizer, gradients and random states are as before each call, also after an error.

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
    724 fits: 7.991 MiB of 8.000 MiB; 725 would take 8.002 MiB (8 sizes simulated)

    Args:
        model: a module on any device; ``meta`` costs no memory.
        optimizer, loss, hardware, keeps_output, probe, parallel, world, shard, tensor: as in `memscale.profile`.
        plan: transforms that the step has already; the plan that is recommended takes its place.
        accumulate: forward and backward passes for each optimizer step.
        config: ``use_empirical_fallback`` and ``warmup_steps`` as in `MemoryProfiler`; what a recommended plan may use,
            None for all that change no bit.
        progress: called before each simulation with what it is about, how many are done, and how many there will be
            (None if that is not known).

    Raises:
        ConfigError: an argument is wrong, or does not fit the others; the message says which.
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
        """Whether the step with this batch fits, and what would free how much.

        What is recommended was simulated like the step itself, and frees something: the repeated blocks checkpointed,
        with more shards, a fused update or `step_in_backward` if it takes that to fit; `cast` to bfloat16, the other
        loops of a ``torch.optim`` optimizer, the batch in as many parts as it takes, their gradients accumulated; and
        at last the plan that `memscale.plan` finds for what the device has (the smallest one where none fits), with
        these beside it if that alone does not fit. Interrupted from the keyboard, the prediction has what was found.

        Args:
            batch: what the model is called with: a tensor is one positional argument, a tuple or list the arguments, a
                mapping keyword arguments.
            budget: what the step may take, where that is less than the device has: bytes as an int, ``"6GiB"`` or
                ``"6GB"``, or a share of ``hardware.usable_bytes`` as a float in (0, 1].
            recommend: whether to look for what frees memory, which takes as long as `memscale.plan` does. None does so
                for a risk above ``OOMRisk.LOW``.
            seconds: how long to look for that; None for as long as it takes, so that the answer is the same each time.

        Raises:
            ConfigError: the batch does not fit the model, or another argument is wrong.
            RuntimeUnavailable: the step can be neither simulated nor run here.
        """
        capacity_bytes = self._capacity_bytes(budget)
        self._step.told = 0
        self._step.next("the step as it is", None if recommend is not False else 1)
        profile = self._step.profile(batch, capacity_bytes)
        prediction = OOMPrediction(profile, capacity_bytes)
        wanted = prediction.risk > OOMRisk.LOW if recommend is None else recommend
        return self.recommended(prediction, batch, seconds=seconds) if wanted else prediction

    def recommended(self, prediction: OOMPrediction, batch: Any, *, seconds: float | None = None) -> OOMPrediction:
        """A prediction of `predict` for this batch, with recommendations; for callers that show the verdict first.

        Args:
            prediction: without them.
            batch, seconds: as in `predict`.
        """
        return recommending(self._step, prediction, batch, seconds)

    def predict_steps(self, batches: Sequence[Any], *, budget: Budget | None = None) -> OOMPrediction:
        """Whether steps with these batches fit, one after the other: text of any length, images of any size.

        The prediction is that of the largest batch. What a CUDA device's allocator reserves is over all of the steps,
        since the blocks that one batch leaves in the cache need not suit the next; the note says by how much that is
        more.

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
            ConfigError: there are no batches, one does not fit the model, or another argument is wrong.
            RuntimeUnavailable: a step can be neither simulated nor run here.
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
        """The largest n such that a step with ``batch_fn(n)`` fits: a batch size or a sequence length.

        A few sizes are simulated, a dozen at most, and a curve through their peaks leads to the answer, at which the
        simulation has the last word: it fits, and one more does not. Interrupted from the keyboard, it returns the
        largest size that was found to fit until then.

        Args:
            batch_fn: returns the batch of size n, on any device. It is called with sizes up to 16 times the answer, so
                tensors on ``meta`` are the ones to make.
            budget: as in `predict`.
            at_least, at_most: the sizes between which to look, such as 1 and the most positions of the model.

        Raises:
            BudgetError: not even ``at_least`` fits; the message has its peak.
            ConfigError: ``batch_fn`` does not scale (it raises, its batch does not depend on n, the model does not take
                its batch), or another argument is wrong.
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
        """Which batch sizes fit with which sequence lengths, by simulating the pairs along the edge of what fits.

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
            batch_fn: returns the batch of a batch size and a length, best on ``meta``.
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
    """The peaks of a batch factory's batches."""

    def __init__(
        self, predictor: OOMPredictor, batch_fn: Callable[[int], Any], at_least: int, capacity_bytes: int
    ) -> None:
        self.predictor = predictor
        self.sizes = Sizes(batch_fn, at_least, "largest")
        self.capacity_bytes = capacity_bytes
        self.peaks: dict[int, int] = {}

    def peak_bytes(self, n: int) -> int:
        """The peak of the step with the batch of size `n`.

        Raises:
            ConfigError: there is no such batch, the model does not take it, or it is that of another size.
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
