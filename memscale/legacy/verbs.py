"""`wrap` and `optimize` apply a plan to a model in place, `detach` removes it exactly, `report` describes it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config, as_code
from memscale.core import ConfigError, Record, RuntimeUnavailable, TransformError, batches, check_count, takes_no
from memscale.legacy.decide import Verdict, decide, resident_bytes
from memscale.legacy.executor import ATTRIBUTE, DETACHED, Executor
from memscale.legacy.log import LOG, say
from memscale.legacy.terms import config_in_force, terms_of
from memscale.planning import Budget
from memscale.runtime import AsyncOffloadConfig
from memscale.simulation import Loop
from memscale.telemetry import counted

_Target = TypeVar("_Target")

# Trainers that make or move their model themselves, and the module that wraps them; imported when one is given, because
# integrations are above this file.
_TRAINERS = {
    "transformers.trainer.Trainer": "memscale.integrations.hf",
    "lightning.pytorch.trainer.trainer.Trainer": "memscale.integrations.lightning",
}

# Classes of modules that wrap does not support, with the reason and the remedy.
_OTHERS = {
    "DataParallel": "whose replicas would run the original's weights; train one process for each GPU under torchrun "
    "(DistributedDataParallel), or make one GPU visible (CUDA_VISIBLE_DEVICES=0)",
    "FullyShardedDataParallel": "of FSDP1, which replaces parameters under a region; use FSDP2, "
    "torch.distributed.fsdp.fully_shard",
    "CheckpointWrapper": "which recomputes on its own, under preserve_rng_state=False with other dropout masks; leave "
    "the recomputing to wrap and take it off (accelerate: fsdp_activation_checkpointing=False)",
}

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Arguments that callers of `wrap` and `optimize` try, with the call that takes them.
_ELSEWHERE = {
    "hardware": "transform(model, plan(model, batch, budget=..., hardware={value!r}))",
    "loss": "plan(model, batch, budget=..., loss=...), and transform(model, ...) with what that returns",
    "plan": "transform(model, plan)",
    "optimizer": "with optimize(model, optimizer)",
}


def _with_fields(verb: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes `verb` answer keyword arguments that belong elsewhere with an error that says where."""

    def write(given: Mapping[str, object]) -> str:
        fields = {name: value for name, value in given.items() if name not in _ELSEWHERE}
        said = [f"{verb.__name__}(..., {as_code(fields)})"] if fields else []
        for name, instead in _ELSEWHERE.items():
            if name in given:
                said.append(instead.format(verb=verb.__name__, value=given[name]))
        return ", ".join(said)

    return takes_no([*(each.name for each in dataclasses.fields(Config)), *_ELSEWHERE], write)(verb)


@counted("wrap")
@_with_fields
def wrap(
    target: _Target,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
    *,
    budget: Budget | None = None,
    record: Record = None,
    accumulate: int = 1,
) -> _Target:
    """Makes ``target`` train in less memory, in place, with the same numbers; `detach` undoes it exactly.

    If the step on ``sample_input`` takes more than ``config.target_gpu_utilization`` of the device's memory, the model
    gets the fastest plan that fits among the transforms that the config allows, as `plan` finds it; if none fits, the
    smallest one with a warning.

    - The planned step uses AdamW, and the loop's own optimizer once that has stepped (`optimize` takes it at once). Its
      loss is the output's own, or a cross entropy.
    - Without ``sample_input`` the first call of the training loop plans for its own batch. After a larger batch the
      next step is planned again.
    - With ``config.force_optimize`` a model that fits gets ``checkpoint()`` on its repeated blocks and what the config
      asks for by name, and so does a model that does not fit and whose step cannot be simulated.
    - An optimizer is found by its first step; from then on the plan's optimizer rules apply to it, such as 8-bit states
      (``use_8bit_optimizer``).
    - A Hugging Face model's ``config.use_cache`` is off while wrapped, and so is its own activation checkpointing where
      the plan replaces it.
    - The first process of a run prints one line about the decision, and logs the hardware, the step and the plan
      (logger ``memscale``, level INFO, and ``config.log_file``), unless ``config.enable_logging`` is False. `report`
      prints all of it at any time.
    - A model that is already wrapped is detached first.

    Args:
        target: an ``nn.Module``; a Trainer of transformers (or TRL) or Lightning, whose model is then wrapped whenever
            it trains; or another object whose ``.model`` is a module.
        config: the allowed techniques; None is ``Config()``. Setting a field that nothing uses yet gives a warning.
        sample_input: the arguments of a call of the model: a tensor, a tuple, or a mapping of keyword arguments.
        async_offload: overrides ``config.async_offload``. If neither is set, the environment variable
            ``MEMSCALE_ASYNC_OFFLOAD=1`` turns it on, provided that the config leaves offloading eligible.
        async_config: overrides ``config.async_config``, the sizes of the offload engine.
        budget: the memory that a step may take, as in `memscale.plan`: ``"20GiB"``, a share of the device's memory, or
            bytes. None is ``config.target_gpu_utilization`` of the device.
        record: adds each planned step, and what it is measured to take, to the history; as in `memscale.profile`.
        accumulate: forward and backward passes for each optimizer step: gradients stay in memory between passes. A
            trainer's own setting takes its place.

    Returns:
        ``target`` itself; ``Executor.of(model)`` is the `Executor` of its model.

    Raises:
        TypeError: ``target`` is neither a module nor a trainer.
        ConfigError: another argument is of the wrong type, ``async_offload=True`` meets
            ``enable_offloading=False``, ``log_file`` cannot be written, or ``verify_correctness`` has no
            ``sample_input`` or meets ``use_mixed_precision=True``.
        RuntimeUnavailable: the caller asked for something that this version does not have, or for offloading on a
            device for which there is no backend; or the model is, or contains, an ``nn.DataParallel`` on several GPUs,
            an FSDP1 unit or PyTorch's ``CheckpointWrapper``. The environment variable causes a logged warning instead.
        TransformError: a module inside ``target`` is wrapped on its own.
        CorrectnessError: ``verify_correctness`` found a number that differs; the model is left unwrapped.

    >>> import torch
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)]
    >>> model = wrap(torch.nn.Sequential(*layers), Config(force_optimize=True))
    memscale: checkpoint on 2 of 2 blocks; its peak is unknown
    >>> Executor.of(model)
    Executor(Sequential, Plan({'*': checkpoint()}))
    >>> detach(model)
    """
    check_count(f"wrap(accumulate={accumulate!r})", accumulate)
    config = config_in_force(config, async_offload, async_config)
    integration = _integration(target)
    if integration is None:
        model = _module_of(target, "wrap")
        wrapped(model, config, sample_input=sample_input, budget=budget, record=record, loop=Loop(accumulate))
    else:
        if sample_input is not None:
            batches.check_batch(sample_input)
        integration.wrap_trainer(target, config, sample_input, record, budget)
    return target


@counted("optimize")
@_with_fields
def optimize(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
    *,
    budget: Budget | None = None,
    record: Record = None,
    accumulate: int = 1,
) -> AbstractContextManager[Executor]:
    """Wraps ``model`` and ``optimizer`` for the length of a ``with`` block, and undoes both at its end.

    Both are restored after an exception too. The optimizer is changed in place (see `docs/wrap.md`); at the end it has
    its own step again, with its present states. The call itself wraps: without ``with``, the model stays wrapped until
    `detach`.

    Args:
        model: as `wrap`'s ``target``.
        optimizer: the optimizer that trains ``model``, with which the step is planned; None is as in `wrap`.
        config: as in `wrap`.
        sample_input: as in `wrap`.
        budget, record, accumulate: as in `wrap`.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``. Other errors are those of `wrap`.

    >>> with optimize(torch.nn.Linear(2, 2)) as executor:
    ...     print(executor.skipped.partition(":")[0])
    the step fits
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimize(optimizer=...) must be a torch.optim.Optimizer or None, "
            f"got {type(optimizer).__name__}; pass the optimizer itself"
        )
    check_count(f"optimize(accumulate={accumulate!r})", accumulate)
    executor = wrapped(
        _module_of(model, "optimize"),
        config,
        sample_input=sample_input,
        optimizer=optimizer,
        budget=budget,
        record=record,
        loop=Loop(accumulate),
    )
    return _Block(executor)


class _Block(AbstractContextManager[Executor]):
    """The context manager of `optimize`, which detaches the model at its end and keeps it alive until then."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.model = executor, executor.model

    def __enter__(self) -> Executor:
        return self.executor

    def __exit__(self, *_: object) -> None:
        self.executor.detach()


@counted("detach")
def detach(model: Any) -> None:
    """Undoes `wrap` on ``model``: every attribute is the same object as before.

    A model that is not wrapped only causes a logged warning.

    Raises:
        TypeError: ``model`` is neither a module nor a trainer.

    >>> import torch
    >>> detach(wrap(torch.nn.Linear(2, 2)))
    """
    if (integration := _integration(model)) is not None:
        integration.unwrap_trainer(model)
        return
    module = _module_of(model, "detach")
    executor = Executor.of(module)
    if executor is None:
        LOG.warning("detach(): this %s is not wrapped; nothing to undo", type(module).__name__)
    else:
        executor.detach()


def report(model: Any) -> None:
    """Prints what `wrap` applied to ``model``, the prediction for the step, and what was measured.

    Args:
        model: as `wrap`'s ``target``. For a detached model (a trainer detaches at its end) the last report is printed.

    Raises:
        TypeError: ``model`` is neither a module nor a trainer.

    >>> report(torch.nn.Linear(2, 2))
    this Linear is not wrapped
    """
    module = _module_of(model, "report")
    executor = Executor.of(module)
    if executor is not None:
        print(executor)
    elif module in DETACHED:
        print(f"detached; while it was wrapped:\n{DETACHED[module]}")
    else:
        print(f"this {type(module).__name__} is not wrapped")


def wrapped(
    model: nn.Module,
    config: Config | None,
    *,
    sample_input: Any,
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: Budget | None = None,
    record: Record = None,
    loop: Loop = Loop(),  # noqa: B008  # immutable
) -> Executor:
    """Wraps a module, under `plan` if one is given; `optimizer` is the one that trains it, if known."""
    config = config_in_force(config)
    if sample_input is not None:
        batches.check_call(model, sample_input)
    elif config.verify_correctness:
        raise ConfigError(
            "Config(verify_correctness=True) compares real steps and needs a batch; pass sample_input=..."
        )
    terms = dataclasses.replace(terms_of(model, config, budget, record, loop), may_step=optimizer is not None)
    _check_can_wrap(model)
    if (previous := Executor.of(model)) is not None:
        say(terms.config, f"{type(model).__name__} is wrapped already: detaching it to plan again")
        previous.detach()
    if plan is None:
        verdict = decide(model, sample_input, optimizer, terms)
    else:
        verdict = Verdict(plan, None, resident_bytes(model, optimizer), for_all=True)
    executor = Executor(model, terms, verdict, optimizer, sample_input)
    executor.attach(sample_input)
    return executor


def _check_can_wrap(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise TransformError(
            "wrap(): the model is a torch.jit.ScriptModule, whose forward runs in C++; wrap the Python module"
        )
    for path, module in model.named_modules():
        if path and ATTRIBUTE in module.__dict__:
            raise TransformError(f"module {path!r} inside the model is wrapped on its own; detach it first")
        for kind, reason in _OTHERS.items():
            # By name, because the class may not be imported, or may be a copy of PyTorch's.
            if type(module).__name__ == kind and len(getattr(module, "device_ids", (0, 1))) > 1:
                raise RuntimeUnavailable(f"wrap(): the module {path!r} is a {kind}, {reason}")


def _integration(target: object) -> Any:
    """Returns the module that wraps a trainer of this class, or None."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(target).__mro__]
    found = next((_TRAINERS[name] for name in names if name in _TRAINERS), None)
    return None if found is None else importlib.import_module(found)


def _module_of(target: object, verb: str) -> nn.Module:
    model = target if isinstance(target, nn.Module) else getattr(target, "model", None)
    if isinstance(model, nn.Module):
        return model
    raise TypeError(
        f"{verb}() takes an nn.Module, or a trainer whose .model is one, got {type(target).__name__}; "
        f"pass the model itself"
    )
