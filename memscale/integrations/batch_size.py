"""`predict` and `find_batch_size`: the memory of a Trainer's step, and the largest batch that fits, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from memscale.core import BudgetError, ConfigError, check_count
from memscale.hardware import Hardware
from memscale.integrations.trainer_step import TRAINER_LOOP, TrainerStep, step_of
from memscale.planning import Budget, LargestBatch, OOMPrediction, OOMPredictor
from memscale.simulation import Loop


@dataclass(frozen=True)
class BatchSize:
    """The batch size with which a Trainer's step fits.

    Attributes:
        per_device: the value for ``per_device_train_batch_size``.
        accumulation: the value for ``gradient_accumulation_steps``.
        largest: the search: the largest batch that fits, and the memory with one row more.
    """

    per_device: int
    accumulation: int
    largest: LargestBatch

    def __str__(self) -> str:
        passes = f"gradient_accumulation_steps={self.accumulation}"
        return f"per_device_train_batch_size={self.per_device}, {passes}\n{self.largest}"


def predict(
    trainer: Trainer,
    *,
    batch: Any = None,
    steps: int = 1,
    hardware: Hardware | str | None = None,
    budget: Budget | None = None,
    recommend: bool | None = None,
) -> OOMPrediction:
    """Predicts whether the training step of a Trainer fits, by simulating it on one process with the longest rows.

    The simulation includes what the Trainer adds to the model: the optimizer of its arguments, accumulated gradients
    and the inputs of all passes, mixed precision with float32 outputs, label smoothing or another loss, clipping, and
    the model's own activation checkpointing. The ``notes`` list what it excludes (evaluation, DDP's buckets, the
    compiler). The Trainer does not change.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    >>> from memscale.integrations import hf
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=500))
    >>> rows = [{"input_ids": [1] * 64, "labels": [1] * 64}] * 32
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = TrainingArguments(folder, per_device_train_batch_size=16, report_to=[], use_cpu=True)
    ...     trainer = Trainer(model, arguments, train_dataset=rows)
    >>> hf.predict(trainer, hardware="t4").fits, hf.predict(trainer, hardware="t4", budget="8MiB", recommend=False).fits
    (True, False)

    Args:
        trainer: before or after ``train()``, wrapped or not.
        batch: a batch as the data collator returns it. `None` makes one of the longest rows, which reads the whole data
            set.
        steps: with more than one, also simulates the first batches of training in order, and predicts the reserved
            memory of a CUDA allocator over these and the longest rows, as in `OOMPredictor.predict_steps`.
        hardware: the device to predict for; `None` is the model's own.
        budget, recommend: as in `OOMPredictor.predict`.

    Raises:
        ConfigError: the Trainer has nothing to train on, or another argument is wrong.
        RuntimeUnavailable: the Trainer shards its model over processes, or its step can be neither simulated nor run.
    """
    _check_trainer(trainer, "predict")
    accumulate = trainer.args.gradient_accumulation_steps
    check_count(f"predict(steps={steps!r})", steps)
    if batch is not None and steps > 1:
        raise ConfigError(f"predict(batch=..., steps={steps}) takes one of the two: a batch, or the Trainer's own")
    with step_of(trainer, reads=batch is None) as step:
        predictor = _predictor(step, hardware, accumulate)
        if batch is None:
            batch = step.collate(step.rows[: trainer.args.per_device_train_batch_size])
        held = trainer.args.per_device_train_batch_size * accumulate
        called = [_whole(step, each, held) for each in step.batches(steps)] if steps > 1 else []
        longest = step.called_with(batch, held)
        found = predictor.predict(longest, budget=budget, recommend=recommend)
        if called:
            over = predictor.predict_steps([*called, longest], budget=budget)
            found = dataclasses.replace(over, recommendations=found.recommendations)
        notes = [*step.notes]
        if (passes := _loop(accumulate).passes) < accumulate:
            notes.append(f"{passes} of the {accumulate} passes were simulated: the times are theirs")
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def _whole(step: TrainerStep, batch: Any, held: int) -> Mapping[str, Any]:
    """Returns the arguments of the model for a batch. Raises if ``compute_loss`` withholds some of the batch."""
    called = step.called_with(batch, held)
    if missing := sorted(set(batch) - set(called)):
        raise ConfigError(
            f"compute_loss of this Trainer does not pass {', '.join(missing)} to the model, and several such steps "
            "cannot be predicted together; leave out steps="
        )
    return called


def find_batch_size(
    trainer: Trainer,
    *,
    hardware: Hardware | str | None = None,
    budget: Budget | None = None,
    keep_global_batch: bool = True,
    apply: bool = False,
) -> BatchSize:
    """Finds the largest batch that fits a Trainer's device by simulation, without a trial on the device.

    Every row is assumed to be as long as the longest row of the data set.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    >>> from memscale.integrations import hf
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=500))
    >>> rows = [{"input_ids": [1] * 64, "labels": [1] * 64}] * 32
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = TrainingArguments(folder, per_device_train_batch_size=16, report_to=[], use_cpu=True)
    ...     trainer = Trainer(model, arguments, train_dataset=rows)
    >>> less = hf.predict(trainer, hardware="t4").profile.peak_bytes - 1  # one byte too few for 16 rows
    >>> found = hf.find_batch_size(trainer, hardware="t4", budget=less)
    >>> found.per_device, found.accumulation  # 8 rows at a time, still 16 in a step
    (8, 2)

    Args:
        trainer: a Trainer before ``train()``.
        hardware, budget: as in `predict`.
        keep_global_batch: keep the number of rows of an optimizer step, ``per_device_train_batch_size`` times
            ``gradient_accumulation_steps``: the result is the largest divisor of it that fits. If `False`, the
            accumulation stays the same.
        apply: write the result into the Trainer's arguments.

    Raises:
        BudgetError: a single row does not fit.
        ConfigError, RuntimeUnavailable: as `predict`.
    """
    for name, value in (("keep_global_batch", keep_global_batch), ("apply", apply)):
        if not isinstance(value, bool):
            raise ConfigError(f"find_batch_size({name}={value!r}) must be True or False")
    _check_trainer(trainer, "find_batch_size")
    args = trainer.args
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    with step_of(trainer) as step:
        if keep_global_batch:
            found = _divisor(step, hardware, budget, rows)
        else:
            passes = args.gradient_accumulation_steps
            predictor = _predictor(step, hardware, passes)
            largest = predictor.largest(lambda count: _repeated(step, count, count * passes), budget=budget)
            found = BatchSize(largest.n, passes, largest)
    if apply:
        args.per_device_train_batch_size = trainer._train_batch_size = found.per_device
        args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = found.accumulation
    return found


def _divisor(step: TrainerStep, hardware: Hardware | str | None, budget: Budget | None, rows: int) -> BatchSize:
    """Returns the largest divisor of `rows` that fits as a batch, with the accumulation that gives `rows`."""
    whole = _predictor(step, hardware, 1)
    at_once = whole.predict(_repeated(step, rows, rows), budget=budget, recommend=False)
    if at_once.fits:
        return BatchSize(rows, 1, LargestBatch(rows, at_once.peak_bytes, None, at_once.capacity_bytes, 1))
    if rows == 1:
        raise BudgetError(f"not even one row fits: {at_once.message}; predict() says what would free memory")
    # Simulated as several passes, since accumulated gradients stay in memory between passes.
    several = _predictor(step, hardware, rows)
    largest = several.largest(lambda count: _repeated(step, count, rows), budget=budget, at_most=rows - 1)
    per_device = max(count for count in range(1, largest.n + 1) if rows % count == 0)
    return BatchSize(per_device, rows // per_device, largest)


def _repeated(step: TrainerStep, count: int, rows: int) -> Any:
    """Returns a batch of `count` copies of the longest row, in a step of `rows` rows."""
    return step.called_with(step.collate([step.rows[0]] * count), rows)


def _predictor(step: TrainerStep, hardware: Hardware | str | None, accumulate: int) -> OOMPredictor:
    loop = _loop(accumulate)
    return OOMPredictor(
        step.model,
        step.optimizer,
        hardware=hardware,
        loss=step.loss,
        accumulate=loop.passes,
        keeps_output=loop.keeps_output,
    )


def _loop(accumulate: int) -> Loop:
    return dataclasses.replace(TRAINER_LOOP, accumulate=accumulate)


def _check_trainer(trainer: Any, verb: str) -> None:
    if not hasattr(trainer, "get_train_dataloader"):
        raise ConfigError(
            f"{verb}(trainer) takes a Trainer of transformers, got {type(trainer).__name__}; for a model and a batch "
            "use OOMPredictor(model, optimizer)"
        )
