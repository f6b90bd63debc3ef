"""The Trainer of transformers, and those made of it (TRL's): the model is wrapped while it trains."""

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

# Below the import that may fail, which says what to install.
from memscale.integrations.batch_size import BatchSize, find_batch_size, predict
from memscale.integrations.trainer_step import TRAINER_LOOP

__all__ = ["BatchSize", "MemScaleCallback", "find_batch_size", "predict"]


class MemScaleCallback(TrainerCallback, ExportableState):
    """Wraps the model of a Trainer: when the Trainer is made, and again when it trains another one (``model_init``).

    The model is detached at the end of training. After an exception it stays wrapped, and can be wrapped again. The
    plan is in ``trainer_state.json``; the logs have the keys of `Executor.as_log`.

    Args:
        config: as in `wrap`.
        plan: to train under, instead of one that is planned.
        sample_input: what the model is called with, as in `wrap`. None plans at the first call.
        log_memory: whether the logs get the keys above.

    Raises:
        ConfigError: `config` is no `Config`.
        PlanError: `plan` is none.
        RuntimeUnavailable: when a Trainer is made that would use ``nn.DataParallel``.

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
        """Before the model is prepared for mixed precision or for several processes."""
        _check(args)
        if model is not None:
            self.wrapping.wrap(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """`model` is another one if ``model_init`` made it, and `state` a checkpoint's if the run is resumed."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(kept, dict):
            self.wrapping.former_plan = kept["attributes"]["plan"]
        if model is not None:
            self.wrapping.wrap(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first one knows the plan."""
        self.wrapping.after_step()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """Add the memory's keys."""
        if self.log_memory and logs is not None and self.wrapping.executor is not None:
            logs.update(self.wrapping.executor.as_log())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Undo what this callback did."""
        self.wrapping.end()

    def state(self) -> dict[str, Any]:
        """What ``trainer_state.json`` keeps: the plan."""
        return {"args": {"log_memory": self.log_memory}, "attributes": {"plan": self.plan}}

    @property
    def plan(self) -> str | None:
        """The plan that holds, as JSON; set by a Trainer that restores its callbacks, which then trains under it."""
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
    """What `wrap` does with a Trainer: its model is wrapped now, and whichever it trains later.

    Raises:
        RuntimeUnavailable: it would use ``nn.DataParallel``.
    """
    _check(trainer.args)
    unwrap_trainer(trainer)
    callback = MemScaleCallback(config, sample_input=sample_input)
    callback.wrapping = Wrapping(config, None, sample_input, record, budget, loop=TRAINER_LOOP)
    if isinstance(trainer.model, nn.Module):
        callback.wrapping.wrap(trainer.model)
    # Before those that report, which read the logs in this order.
    trainer.callback_handler.callbacks.insert(0, callback)


def unwrap_trainer(trainer: Trainer) -> None:
    """Undo `wrap_trainer`."""
    for callback in [each for each in trainer.callback_handler.callbacks if isinstance(each, MemScaleCallback)]:
        callback.wrapping.end()
        trainer.callback_handler.callbacks.remove(callback)


def _check(args: Any) -> None:
    if args.n_gpu > 1:
        raise RuntimeUnavailable(
            f"this Trainer has {args.n_gpu} GPUs in one process and would use nn.DataParallel, whose replicas run the "
            "original's weights; start it with torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
