"""Takes the training step of a transformers Trainer apart, into the model, loss, optimizer and rows of a prediction."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from memscale.algebra import ForwardPatch
from memscale.core import ConfigError, Loss, RuntimeUnavailable, tensors
from memscale.integrations.mixed_precision import MixedPrecisionForward
from memscale.regions import Environment, accelerators
from memscale.simulation import Loop

#: The output is a local variable of ``Trainer.compute_loss``, which returns the loss before backward begins.
TRAINER_LOOP = Loop(keeps_output=False)


@dataclass(frozen=True)
class TrainerStep:
    """The parts of a Trainer's step, valid inside `step_of`.

    Attributes:
        model: the model, with its forward in the Trainer's mixed precision.
        optimizer: the optimizer that the Trainer has or would make; it clips gradients before it steps.
        loss: the Trainer's ``compute_loss``, as a function of the model's output and its arguments.
        called_with: maps (a batch of the data collator, the number of rows in the step) to the model's arguments.
        collate: the data collator.
        rows: the rows of a process in one step of the optimizer, longest first.
        batches: maps n to the first n batches of training, or fewer if there are fewer, as the data collator returns
            them.
        notes: what the prediction does not count.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    called_with: Callable[[Any, int], Mapping[str, Any]]
    collate: Callable[[Sequence[Any]], Any]
    rows: Sequence[Any]
    batches: Callable[[int], list[Any]]
    notes: tuple[str, ...]


@contextlib.contextmanager
def step_of(trainer: Any, *, reads: bool = True) -> Iterator[TrainerStep]:
    """Gives the step of `trainer`, and restores trainer, model, optimizer and random states afterwards.

    Args:
        trainer: a Trainer of transformers.
        reads: whether to read the rows of the data set.

    Raises:
        ConfigError: the Trainer has no rows, or its ``compute_loss`` cannot be separated from its model.
        RuntimeUnavailable: the Trainer shards the model over processes.
    """
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise RuntimeUnavailable(
            "this Trainer shards its model (DeepSpeed or FSDP), and memscale cannot simulate the step of a shard; use "
            "a Trainer without sharding, whose prediction is for one process with the whole model"
        )
    model = trainer.model
    with contextlib.ExitStack() as stack:
        stack.callback(Environment(accelerators(model.parameters()), host_random=True).enter, [])  # random states
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.train()
        _checkpoint_model(trainer, stack)
        optimizer = _optimizer(trainer, stack)
        collate, rows, batches, notes = _data(trainer) if reads else (trainer.data_collator, [], lambda _: [], [])
        split = _SplitLoss(trainer)
        _mix_precision(trainer, stack)
        if trainer.args.torch_compile:
            notes.append("not counted: what the compiler fuses or keeps; the step is simulated in eager mode")
        if trainer.args.world_size > 1:
            notes.append("not counted: the buckets of DistributedDataParallel, one more copy of the gradients")
        notes.append("not counted: evaluation, which keeps the logits of all rows until eval_accumulation_steps")
        yield TrainerStep(model, optimizer, split.loss, split.called_with, collate, rows, batches, tuple(notes))


class _SplitLoss:
    """Splits a Trainer's ``compute_loss`` into the arguments of the model and the loss of its output."""

    def __init__(self, trainer: Any) -> None:
        # Weakly, since the simulation counts all tensors that the loss refers to, and a Trainer refers to its data set.
        self._trainer_reference = weakref.ref(trainer)
        self._inputs: Mapping[str, Any] = {}  # the last batch, including entries that only the loss uses
        self._other_inputs: list[torch.Tensor] = []  # those of the step's other passes, all moved at once

    def called_with(self, inputs: Any, rows: int) -> Mapping[str, Any]:
        """Returns the model's arguments for `inputs`, a batch of the data collator, in a step of `rows` rows."""
        if not isinstance(inputs, Mapping):
            raise ConfigError(
                f"the data collator of this Trainer returns a {type(inputs).__name__}, and a Trainer's model is called "
                "with keywords; give one that returns a mapping"
            )
        called: list[dict[str, Any]] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                raise ConfigError(
                    "compute_loss of this Trainer calls its model with positional arguments; use keywords"
                )
            called.append(kwargs)
            raise _ModelCalled

        with contextlib.suppress(_ModelCalled):
            self._compute(inputs, forward)
        if not called:
            raise ConfigError(
                f"compute_loss of this {type(self._trainer).__name__} does not call its model's forward, so that there "
                "is no step to predict; use memscale.profile with a function that runs one pass"
            )
        self._inputs = inputs
        others = max(rows - _count(inputs), 0)
        self._other_inputs = [each.new_empty((others, *each.shape[1:])) for each in tensors(inputs) if each.dim()]
        return called[0]

    def loss(self, output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the loss that ``compute_loss`` computes from an output of the model."""
        count = _count(batch)
        calls = 0

        def forward(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            return output

        # `batch` may be a part of the inputs with fewer rows; the other entries are cut to as many.
        inputs = {name: batch[name] if name in batch else _first(value, count) for name, value in self._inputs.items()}
        loss = self._compute(inputs, forward)
        assert len(self._other_inputs) <= len(inputs)  # refers to the tensors here, so that the simulation counts them
        if calls != 1:
            raise ConfigError(
                f"compute_loss of this {type(self._trainer).__name__} calls its model {calls} times, and only one call "
                "can be predicted; use memscale.profile with a function that runs one pass"
            )
        return loss

    @property
    def _trainer(self) -> Any:
        trainer = self._trainer_reference()
        assert trainer is not None
        return trainer

    def _compute(self, inputs: Mapping[str, Any], forward: Callable[..., Any]) -> torch.Tensor:
        trainer = self._trainer
        count = None
        if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
            count = max((tensor.numel() for tensor in tensors([inputs.get("labels")])), default=None)
        patch = ForwardPatch(trainer.model)
        trainer.model.__dict__["forward"] = forward
        try:
            loss: torch.Tensor = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=count)
            return loss
        finally:
            patch.put_back()


class _ModelCalled(Exception):
    """Raised to leave ``compute_loss`` when it calls the model; not an error."""


def _mix_precision(trainer: Any, stack: contextlib.ExitStack) -> None:
    """Puts the model's forward under the Trainer's autocast until `stack` closes."""
    model, precision = trainer.model, trainer.accelerator.mixed_precision
    if precision not in ("bf16", "fp16"):
        return
    stack.callback(ForwardPatch(model).put_back)
    # A model that accelerate has prepared keeps its forward from before in `_original_forward`.
    under = model.__dict__.get("_original_forward", model.__dict__.get("forward"))
    if getattr(under, "__func__", None) is type(model).forward:
        under = None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    model.__dict__["forward"] = MixedPrecisionForward(model, under, dtype)


def _optimizer(trainer: Any, stack: contextlib.ExitStack) -> torch.optim.Optimizer:
    """Returns the Trainer's optimizer, which clips as the Trainer does until `stack` closes."""
    kept = trainer.optimizer
    try:
        made = trainer.create_optimizer() if kept is None else kept
    finally:
        trainer.optimizer = kept
    optimizer: torch.optim.Optimizer = getattr(made, "optimizer", made)  # accelerate wraps PyTorch's optimizer
    most = trainer.args.max_grad_norm

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], most)

    if most is not None and most > 0:
        stack.callback(optimizer.register_step_pre_hook(clip).remove)
    return optimizer


def _checkpoint_model(trainer: Any, stack: contextlib.ExitStack) -> None:
    """Turns the model's own checkpointing on until `stack` closes, as ``Trainer.train`` does."""
    args, model = trainer.args, trainer.model
    new = hasattr(args, "activation_checkpointing")  # the name of the argument since transformers 5
    verb = "activation_checkpointing" if new else "gradient_checkpointing"
    if not getattr(args, verb) or getattr(model, f"is_{verb}", False):
        return
    options = getattr(args, f"{verb}_kwargs", None) or {}
    getattr(model, f"{verb}_enable")(**({f"{verb}_kwargs": options} if options else {}))
    stack.callback(getattr(model, f"{verb}_disable"))


def _data(trainer: Any) -> tuple[Callable[[Sequence[Any]], Any], list[Any], Callable[[int], list[Any]], list[str]]:
    """Returns the data collator, the rows of a process in one step of the optimizer, `batches` and notes."""
    if trainer.train_dataset is None:
        raise ConfigError("this Trainer has no train_dataset, whose rows are what a step is predicted for")
    prepared = trainer.accelerator._dataloaders
    before = list(prepared)
    loader = trainer.get_train_dataloader()
    prepared[:] = before
    data = loader.dataset
    count = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    notes = []
    streams = isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__")
    if streams:
        rows = list(islice(iter(data), count))
        notes.append(f"the first {len(rows)} rows were taken: a data set without a length is not read to its end")
    else:
        longest = sorted(range(len(data)), key=lambda at: -_length(data[at]))[:count]
        rows = [data[at] for at in longest]
    if not rows:
        raise ConfigError("the train_dataset of this Trainer is empty; a step is predicted for its rows")

    def batches(most: int) -> list[Any]:
        # The Trainer's sampler draws as in training. The rows are read here, since the loader would move them.
        drawn = _chunks(iter(data), trainer.args.per_device_train_batch_size) if streams else loader.batch_sampler
        return [loader.collate_fn(each if streams else [data[at] for at in each]) for each in islice(drawn, most)]

    # Rows of a small data set repeat, as they do in training over several epochs.
    return loader.collate_fn, [rows[at % len(rows)] for at in range(count)], batches, notes


def _chunks(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(islice(rows, size)):
        yield chunk


def _length(row: Any) -> int:
    values = row.values() if isinstance(row, Mapping) else row if isinstance(row, (tuple, list)) else (row,)
    return max((_size(value) for value in values), default=0)


def _size(value: Any) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(np.prod(value.shape))
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else 1


def _count(batch: Any) -> int:
    return next((tensor.shape[0] for tensor in tensors(batch) if tensor.dim()), 1)


def _first(value: Any, count: int) -> Any:
    return value[:count] if isinstance(value, torch.Tensor) and value.dim() else value
