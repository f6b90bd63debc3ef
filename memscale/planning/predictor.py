"""`OOMPredictor`: will this step fit on that device, what would make it fit, and how large can its batch be."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, PlanLike, as_plan
from memscale.config import Config
from memscale.core import BudgetError, ConfigError, Loss, MemscaleError, budget_bytes, format_bytes, tensors
from memscale.hardware import Hardware
from memscale.planning.engine import Budget, DecisionEngine
from memscale.planning.grid import SizeGrid, fitting_grid
from memscale.planning.largest import MOST_SIMULATIONS, LargestBatch, largest_fitting
from memscale.planning.prediction import OOMPrediction, OOMRisk, Recommendation, taken_bytes
from memscale.planning.remedies import optimizer_options, other_loops, shorthands, split, summary
from memscale.planning.sizes import Sizes, check_range
from memscale.planning.step_simulator import Progress
from memscale.simulation import MemoryProfiler, Parallel, Ranks, arguments_of
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
    the step does not fit: its peak of 10.8 MiB is 2.82 MiB above the 8.00 MiB of box
    >>> any(each.plan and each.peak_bytes <= prediction.capacity_bytes for each in prediction.recommendations)
    True
    >>> print(predictor.largest(lambda rows: torch.ones(rows, 64)))
    742 fits: 7.99 MiB of 8.00 MiB; 743 would take 8.00 MiB (8 sizes simulated)

    Args:
        model: a module on any device; ``meta`` costs no memory.
        optimizer, loss, hardware, probe, parallel, world, shard, tensor: as in `memscale.profile`.
        plan: transforms that the step has already; the plan that is recommended takes its place.
        accumulate: forward and backward passes for each optimizer step.
        config: ``use_empirical_fallback`` and ``warmup_steps`` as in `MemoryProfiler`; what a recommended plan may use,
            None for every exact transform.
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
        config: Config | None = None,
        probe: bool = False,
        progress: Progress | None = None,
        parallel: Parallel | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"OOMPredictor(model=...) takes a torch.nn.Module, got {type(model).__name__}; for a function that "
                "runs one step, compare memscale.profile(function).peak_bytes with the device's memory"
            )
        self.ranks = Ranks.of(model, parallel, world, shard, tensor, caller="OOMPredictor")
        self.model = model
        self.optimizer = optimizer
        self.plan = Plan() if plan is None else as_plan(plan)
        self.loss = loss
        self.accumulate = accumulate
        self.config = config if config is not None else Config()
        self._allowed = config
        self.probe = probe
        self._progress = progress
        self._told = 0  # simulations of this prediction
        self._profiler = self._profiling(self.plan, self.config, hardware)
        self.hardware = self._profiler.hardware

    @counted("predict")
    def predict(self, batch: Any, *, budget: Budget | None = None, recommend: bool | None = None) -> OOMPrediction:
        """Whether the step with this batch fits, and what would free how much.

        What is recommended was simulated like the step itself, and frees something: the plan that `memscale.plan`
        finds for what the device has (the smallest one where none fits), `cast` to bfloat16, the other loops of a
        ``torch.optim`` optimizer, also with that plan, and the batch in as many parts as it takes, their gradients
        accumulated, with the plan too if that alone does not fit.

        Args:
            batch: what the model is called with: a tensor is one positional argument, a tuple or list the arguments, a
                mapping keyword arguments.
            budget: what the step may take, where that is less than the device has: bytes as an int, ``"6GiB"`` or
                ``"6GB"``, or a share of ``hardware.usable_bytes`` as a float in (0, 1].
            recommend: whether to look for what frees memory, which takes as long as `memscale.plan` does. None does so
                for a risk above ``OOMRisk.LOW``.

        Raises:
            ConfigError: the batch does not fit the model, or another argument is wrong.
            RuntimeUnavailable: the step can be neither simulated nor run here.
        """
        capacity_bytes = self._capacity_bytes(budget)
        self._told = 0
        self._next("the step as it is", None if recommend is not False else 1)
        profile = self._profiler.profile(batch, accumulate=self.accumulate, capacity_bytes=capacity_bytes)
        prediction = OOMPrediction(profile, capacity_bytes)
        wanted = prediction.risk > OOMRisk.LOW if recommend is None else recommend
        return self._recommending(prediction, batch) if wanted else prediction

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
        batches = list(batches)
        if not batches:
            raise ConfigError("predict_steps(batches=[]) needs at least one batch")
        largest = max(reversed(batches), key=lambda batch: sum(leaf.numel() for leaf in tensors(batch)))
        alone = self.predict(largest, budget=budget, recommend=False)
        if alone.profile.reserved_peak_bytes is None:
            return alone
        self._next(f"{len(batches)} steps", None)
        reserved = self._profiler.reserved_over(
            batches, accumulate=self.accumulate, capacity_bytes=alone.capacity_bytes
        )
        assert reserved is not None, "the device has an allocator"
        note = (
            f"over {len(batches)} steps the allocator reserves {format_bytes(reserved)}, and with the largest batch "
            f"alone {format_bytes(alone.profile.reserved_peak_bytes)}"
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
            raise BudgetError(
                f"not even batch_fn({at_least}) fits: its step takes {format_bytes(peaks[at_least])} "
                f"({peaks[at_least]} bytes) of {format_bytes(capacity_bytes)}; predict() says what would free memory"
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
        1           yes   289 KiB
        4       289 KiB  1.03 MiB
        16     1.03 MiB        no

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
            self._say(f"{batch} x {length}", next(done), most)
            profile = self._profiler.profile(
                batch_fn(batch, length), accumulate=self.accumulate, capacity_bytes=capacity_bytes
            )
            return taken_bytes(profile)

        return fitting_grid(peak_bytes, capacity_bytes, batches=batches, lengths=lengths)

    def _recommending(self, prediction: OOMPrediction, batch: Any) -> OOMPrediction:
        found: list[Recommendation] = []
        notes: list[str] = []

        def tried(what: str, make: Callable[[], Recommendation | None]) -> Recommendation | None:
            try:
                better = make()
            except MemscaleError as error:
                notes.append(f"not simulated: {what}: {error}")
                return None
            if better is None or better.freed_bytes <= 0:
                return None
            found.append(better)
            return better

        planned = tried("a plan", lambda: self._planned(prediction, batch, notes))
        plan = None if planned is None else planned.plan
        if casting := shorthands(self.model, self.hardware).get("cast", {}):
            own = [(rule.pattern, rule.transform) for rule in self.plan]
            if not any("cast" in repr(how) for _, how in own):
                whole = Plan([*own, *casting.items()])
                tried("cast()", lambda: self._simulated("cast() on the whole model", prediction, batch, whole))
        short = planned is None or planned.peak_bytes > prediction.capacity_bytes
        loops = other_loops(self.optimizer)
        # No loop of the optimizer lowers a peak that is in forward or backward.
        for options in loops if prediction.profile.moment.phase == "optimizer" else []:
            tried(_loop(options), lambda: self._simulated(_loop(options), prediction, batch, None, options))  # noqa: B023
        if planned is not None and short and loops:
            both = f"{planned.action}, and {_loop(loops[0])}"
            tried(both, lambda: self._simulated(both, prediction, batch, plan, loops[0]))
        if split(batch, 2) is not None:
            tried("accumulate gradients", lambda: self._in_parts(prediction, batch, None))
            if planned is not None and short:
                tried("the plan and accumulated gradients", lambda: self._in_parts(prediction, batch, plan))
        best_first = sorted(found, key=lambda each: -each.freed_bytes)
        return dataclasses.replace(prediction, recommendations=tuple(best_first), notes=tuple(notes))

    def _planned(self, prediction: OOMPrediction, batch: Any, notes: list[str]) -> Recommendation | None:
        """The plan of the planner: the fastest that fits with the least risk, the smallest where none fits.

        A step that has to be measured cannot be planned: its repeated blocks are checkpointed.
        """
        if prediction.profile.method == "empirical":
            rule = Plan(shorthands(self.model, self.hardware).get("checkpoint", {}))
            return self._simulated(summary(rule), prediction, batch, rule) if rule and not self.plan else None
        engine = DecisionEngine(
            self.model,
            batch,
            optimizer=self.optimizer,
            loss=self.loss,
            config=self._allowed,
            hardware=self.hardware,
            accumulate=self.accumulate,
            progress=lambda what, *_: self._next(what),
            **arguments_of(self.ranks),
        )
        capacity_bytes = prediction.capacity_bytes
        limits = [capacity_bytes, capacity_bytes * 85 // 100, prediction.peak_bytes * 3 // 4]
        plan = engine.nearest(max(1, next((each for each in limits if each < prediction.peak_bytes), limits[-1])))
        notes += [f"not simulated: {candidate}: {reason}" for candidate, reason in plan.evidence.rejected.items()]
        if not plan:
            return None
        seconds = plan.evidence.planned.step_seconds if prediction.profile.step_seconds is not None else None
        peak_bytes = plan.evidence.planned.taken_bytes
        instead = " instead of yours" if self.plan else ""
        action = f"apply the plan{instead}: {summary(plan)}"
        return Recommendation(action, prediction.peak_bytes - peak_bytes, peak_bytes, plan=plan, step_seconds=seconds)

    def _simulated(
        self,
        action: str,
        prediction: OOMPrediction,
        batch: Any,
        plan: Plan | None,
        options: Mapping[str, bool] | None = None,
    ) -> Recommendation:
        self._next(action)
        profiler = self._like(prediction, plan)
        with optimizer_options(self.optimizer, options or {}):
            profile = profiler.profile(batch, accumulate=self.accumulate, capacity_bytes=prediction.capacity_bytes)
        peak_bytes = taken_bytes(profile)
        return Recommendation(
            action,
            prediction.peak_bytes - peak_bytes,
            peak_bytes,
            plan=plan,
            optimizer_options=options or {},
            step_seconds=profile.step_seconds,
        )

    def _in_parts(self, prediction: OOMPrediction, batch: Any, plan: Plan | None) -> Recommendation | None:
        """The step with the batch in 2, 4, 8, ... parts, until it fits or smaller ones free no more."""
        profiler = self._like(prediction, plan)
        best: Recommendation | None = None
        parts = 2
        while (part := split(batch, parts)) is not None:
            action = f"accumulate the gradients of {parts} equal parts of the batch"
            action += "" if plan is None else f", and apply the plan: {summary(plan)}"
            self._next(action)
            try:
                # From the second pass on all are alike: two show the peak of any number, though not the time.
                profile = profiler.profile(part, accumulate=2, capacity_bytes=prediction.capacity_bytes)
                peak_bytes = taken_bytes(profile)
            except MemscaleError:
                if best is None:
                    raise
                break  # BatchNorm, for one, takes no single row
            if best is not None and peak_bytes >= best.peak_bytes:
                break
            best = Recommendation(action, prediction.peak_bytes - peak_bytes, peak_bytes, plan=plan, parts=parts)
            if peak_bytes <= prediction.capacity_bytes:
                break
            parts *= 2
        return best

    def _like(self, prediction: OOMPrediction, plan: Plan | None) -> MemoryProfiler:
        """A profiler of another step that goes the same way: a simulation is not compared with real steps."""
        measured = prediction.profile.method == "empirical"
        config = dataclasses.replace(self.config, use_empirical_fallback=measured)
        return self._profiling(self.plan if plan is None else plan, config, self.hardware)

    def _profiling(self, plan: Plan, config: Config, hardware: Hardware | str | None) -> MemoryProfiler:
        return MemoryProfiler(
            self.model,
            self.optimizer,
            loss=self.loss,
            plan=plan if plan else None,
            hardware=hardware,
            config=config,
            probe=self.probe,
            **arguments_of(self.ranks),
        )

    def _capacity_bytes(self, budget: Budget | None) -> int:
        usable_bytes = self.hardware.usable_bytes
        return usable_bytes if budget is None else min(usable_bytes, budget_bytes(budget, usable_bytes))

    def _next(self, what: str, total: int | None = None) -> None:
        self._say(what, self._told, total)
        self._told += 1

    def _say(self, what: str, done: int, total: int | None) -> None:
        if self._progress is not None:
            self._progress(what, done, total)


def _loop(options: Mapping[str, bool]) -> str:
    name, value = next(iter(options.items()))
    return f"build the optimizer with {name}={value}"


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
        self.predictor._say(f"size {n}", len(self.sizes.parts), None)
        batch = self.sizes.batch(n)
        try:
            profile = self.predictor._profiler.profile(
                batch, accumulate=self.predictor.accumulate, capacity_bytes=self.capacity_bytes
            )
        except MemscaleError as error:
            if n == self.sizes.at_least:
                raise
            raise ConfigError(f"the step does not run with batch_fn({n}): {error}; {self.sizes.remedy(n)}") from error
        self.peaks[n] = taken_bytes(profile)
        return self.peaks[n]
