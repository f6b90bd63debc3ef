"""A callback for the Trainer of transformers and its subclasses (TRL's), which wraps the model during training."""

from __future__ import annotations

from typing import Any

from torch import nn

from memscale.algebra import Plan, PlanLike
from memscale.config import Config
from memscale.core import Record, RuntimeUnavailable
from memscale.integrations.wrapping import Wrapping
from memscale.planning import Budget

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise RuntimeUnavailable(
        f"memscale.integrations.hf needs transformers ({error}); pip install 'memscale-transforms[hf]'"
    ) from error

# Imported after transformers, so that the error about a missing transformers comes first.
from memscale.integrations.batch_size import BatchSize, find_batch_size, predict
from memscale.integrations.trainer_step import TRAINER_LOOP

__all__ = ["BatchSize", "MemScaleCallback", "find_batch_size", "predict"]


class MemScaleCallback(TrainerCallback, ExportableState):
    """Wraps the model when a Trainer is made, and again if ``model_init`` makes another model.

    The model is detached at the end of training. After an exception it stays wrapped, and can be wrapped again. The
    plan is stored in ``trainer_state.json``; the logs have the keys of `Executor.as_log`.

    Args:
        config: as in `wrap`.
        plan: the plan to train under; `None` makes one.
        sample_input: the arguments of the model, as in `wrap`. `None` plans at the first call.
        log_memory: whether to add the keys of `Executor.as_log` to the logs.

    Raises:
        ConfigError: `config` is no `Config`.
        PlanError: `plan` is no plan.
        RuntimeUnavailable: the Trainer would use ``nn.DataParallel``.

    >>> from memscale.integrations.hf import MemScaleCallback
    >>> import memscale as ms
    >>> MemScaleCallback(plan={"transformer.h.*": ms.checkpoint()})  # for Trainer(..., callbacks=[...])
    MemScaleCallback(plan={'transformer.h.*': checkpoint()})
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        plan: PlanLike | None = None,
        sample_input: Any = None,
        log_memory: bool = True,
    ) -> None:
        self.wrapping = Wrapping(config, plan, sample_input, loop=TRAINER_LOOP)
        self.log_memory = log_memory

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Wraps the model, before the Trainer prepares it for mixed precision or for several processes."""
        _check(args)
        if model is not None:
            self.wrapping.wrap(model, args.gradient_accumulation_steps)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Wraps a model that ``model_init`` made, and reads the plan of a resumed run from `state`."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step > 0 and isinstance(kept, dict):  # a new run has the state of its own callbacks
            self.wrapping.former_plan = kept["attributes"]["plan"]
        if model is not None:
            self.wrapping.wrap(model, args.gradient_accumulation_steps)
        self.wrapping.trained_by([getattr(optimizer, "optimizer", optimizer)])  # in accelerate's wrapper

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Records the plan after the first step, which makes it."""
        self.wrapping.after_step()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """Adds the memory keys to the logs."""
        if self.log_memory and logs is not None and self.wrapping.executor is not None:
            logs.update(self.wrapping.executor.as_log())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detaches the model."""
        self.wrapping.end()

    def state(self) -> dict[str, Any]:
        """Returns the state for ``trainer_state.json``: the plan."""
        return {"args": {"log_memory": self.log_memory}, "attributes": {"plan": self.plan}}

    @property
    def plan(self) -> str | None:
        """The present plan as JSON. A Trainer that restores its callbacks sets it, and then trains under this plan."""
        return self.wrapping.plan

    @plan.setter
    def plan(self, text: str | None) -> None:
        if text is not None:
            self.wrapping = Wrapping(None, Plan.from_json(text), None, loop=TRAINER_LOOP)

    def __repr__(self) -> str:
        return repr(self.wrapping)


def wrap_trainer(
    trainer: Trainer, config: Config | None, sample_input: Any, record: Record, budget: Budget | None
) -> None:
    """Adds the callback to a Trainer for `wrap`, and wraps its present model.

    Raises:
        RuntimeUnavailable: the Trainer would use ``nn.DataParallel``.
    """
    _check(trainer.args)
    unwrap_trainer(trainer)
    callback = MemScaleCallback(config, sample_input=sample_input)
    callback.wrapping = Wrapping(config, None, sample_input, record, budget, loop=TRAINER_LOOP)
    if isinstance(trainer.model, nn.Module):
        callback.wrapping.wrap(trainer.model, trainer.args.gradient_accumulation_steps)
    # First, because reporting callbacks read the logs in order.
    trainer.callback_handler.callbacks.insert(0, callback)


def unwrap_trainer(trainer: Trainer) -> None:
    """Undoes `wrap_trainer`."""
    for callback in [each for each in trainer.callback_handler.callbacks if isinstance(each, MemScaleCallback)]:
        callback.wrapping.end()
        trainer.callback_handler.callbacks.remove(callback)


def _check(args: Any) -> None:
    if args.n_gpu > 1:
        raise RuntimeUnavailable(
            f"this Trainer has {args.n_gpu} GPUs in one process and would use nn.DataParallel, whose replicas run the "
            "original's weights; start it with torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
