"""A callback for Lightning's Trainer, which wraps the module during a fit."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from memscale.algebra import PlanLike
from memscale.config import Config
from memscale.core import Record, RuntimeUnavailable
from memscale.integrations.wrapping import Wrapping
from memscale.planning import Budget
from memscale.simulation import Loop

try:
    import lightning
except ImportError as error:
    raise RuntimeUnavailable(
        f"memscale.integrations.lightning needs Lightning ({error}); pip install 'memscale-transforms[lightning]'"
    ) from error

# Lightning keeps all results of `training_step` (`ClosureResult.extra`) until the end of the step.
_LOOP = Loop(keeps_output=True)


def _passes(trainer: lightning.Trainer) -> int:
    # Lightning calls `zero_grad` between `training_step` and backward: as in the second of two accumulated passes,
    # gradients are in memory while the model runs.
    return max(2, int(trainer.accumulate_grad_batches))


class MemScaleCallback(lightning.Callback):  # type: ignore[misc]  # whose types are skipped
    """Wraps a LightningModule during a fit, including the trials of a batch size finder.

    The wrapped module is the LightningModule itself if it has a ``forward`` of its own, else the child with nearly all
    of its parameters, whose forward the ``training_step`` calls. Layers made in ``configure_model`` are wrapped after
    it. The module is detached when the fit ends or raises. The plan is stored in the checkpoints.

    Args:
        config: as in `wrap`.
        plan: the plan to train under, with paths relative to the wrapped module; `None` makes one.
        sample_input: the arguments of the wrapped module, as in `wrap`. `None` plans at the first call.
        log_memory: whether loggers get the keys of `Executor.as_log`, at logging steps.

    Raises:
        ConfigError: `config` is no `Config`.
        PlanError: `plan` is no plan.

    >>> from memscale.integrations.lightning import MemScaleCallback
    >>> import memscale as ms
    >>> MemScaleCallback(plan={"layers.*": ms.checkpoint()})  # for lightning.Trainer(callbacks=[...])
    MemScaleCallback(plan={'layers.*': checkpoint()})
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        plan: PlanLike | None = None,
        sample_input: Any = None,
        log_memory: bool = True,
    ) -> None:
        super().__init__()
        self.wrapping = Wrapping(config, plan, sample_input, loop=_LOOP)
        self.log_memory = log_memory
        self._unconfigured: weakref.ref[nn.Module] | None = None  # the module to wrap after its configure_model

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wraps the module, before it moves to its device, as `offload` of parameters requires."""
        if stage != "fit":
            return
        if type(pl_module).configure_model is lightning.LightningModule.configure_model:
            self.wrapping.wrap(_trained(pl_module), _passes(trainer))
        elif "configure_model" not in pl_module.__dict__:
            configure = pl_module.configure_model

            def configured() -> None:
                configure()
                self.wrapping.wrap(_trained(pl_module), _passes(trainer))

            pl_module.configure_model = configured
            self._unconfigured = weakref.ref(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes plans for the module's optimizer."""
        self.wrapping.trained_by(trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the keys of `Executor.as_log` at logging steps, and the plan after the first batch."""
        self.wrapping.after_step()
        executor, step = self.wrapping.executor, trainer.global_step
        if self.log_memory and executor is not None and step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(executor.as_log(), step=step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detaches the module, because Lightning calls no `teardown` after an exception."""
        self.end()

    def end(self) -> None:
        """Detaches the module."""
        if self._unconfigured is not None and (module := self._unconfigured()) is not None:
            module.__dict__.pop("configure_model", None)
        self._unconfigured = None
        self.wrapping.end()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the plan."""
        return {"plan": self.wrapping.plan}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads the plan of the run that is resumed."""
        self.wrapping.former_plan = state_dict["plan"]

    def __repr__(self) -> str:
        return repr(self.wrapping)


def wrap_trainer(
    trainer: lightning.Trainer, config: Config | None, sample_input: Any, record: Record, budget: Budget | None
) -> None:
    """Adds the callback to a Trainer of Lightning, for `wrap`."""
    unwrap_trainer(trainer)
    callback = MemScaleCallback(config, sample_input=sample_input)
    callback.wrapping = Wrapping(config, None, sample_input, record, budget, loop=_LOOP)
    trainer.callbacks.append(callback)


def unwrap_trainer(trainer: lightning.Trainer) -> None:
    """Undoes `wrap_trainer`."""
    for callback in [each for each in trainer.callbacks if isinstance(each, MemScaleCallback)]:
        callback.end()
        trainer.callbacks.remove(callback)


def _trained(module: nn.Module) -> nn.Module:
    """Returns the part of a LightningModule whose forward a training step calls."""
    if type(module).forward is not lightning.LightningModule.forward:
        return module
    sizes = {child: sum(parameter.numel() for parameter in child.parameters()) for child in module.children()}
    largest = max(sizes, key=sizes.__getitem__, default=module)
    return largest if sizes.get(largest, 0) > 0.9 * sum(sizes.values()) else module
