"""The legacy face: `wrap` and `optimize` apply a plan to a model in place, `detach` takes it off exactly."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config, as_code, check_config
from memscale.core import (
    ConfigError,
    Record,
    RuntimeUnavailable,
    TransformError,
    batches,
    budget_bytes,
    history_path,
    takes_no,
)
from memscale.inspection import check_same_numbers
from memscale.legacy.decision import Terms, Verdict, decide, hardware_of, resident_bytes
from memscale.legacy.executor import ATTRIBUTE, DETACHED, Executor
from memscale.legacy.log import LOG, say
from memscale.legacy.offloading import with_runtime
from memscale.legacy.optimizing import without_8_bits
from memscale.observability import check_can_serve
from memscale.planning import Budget
from memscale.runtime import AsyncOffloadConfig
from memscale.telemetry import counted

_Target = TypeVar("_Target")

# The trainers that make or move their model themselves, and what wraps them: loaded when one is given, since it stands
# above this file.
_TRAINERS = {
    "transformers.trainer.Trainer": "memscale.integrations.hf",
    "lightning.pytorch.trainer.trainer.Trainer": "memscale.integrations.lightning",
}

# Modules of others that wrap does not work inside or around: (class, why, and what to do instead).
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

# What callers give to `wrap` and `optimize`, which plan for the model's own device.
_ELSEWHERE = {
    "hardware": "transform(model, plan(model, batch, budget=..., hardware={value!r}))",
    "loss": "plan(model, batch, budget=..., loss=...), and transform(model, ...) with what that returns",
    "plan": "transform(model, plan)",
    "optimizer": "with optimize(model, optimizer)",
}


def _with_fields(verb: Callable[_P, _T]) -> Callable[_P, _T]:
    """`verb`, which says where settings belong that are given to it by name."""

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
) -> _Target:
    """Make ``target`` train in less memory, in place, to the same numbers; `detach` undoes it exactly.

    Where the step on ``sample_input`` takes more than ``config.target_gpu_utilization`` of the device's memory, the
    model gets the fastest plan that fits, as `plan` finds it among the transforms that the config allows, or the
    smallest one with a warning if none does. The step is one with AdamW (`optimize` takes yours) and the output's own
    loss, or else a sum of the outputs. Without ``sample_input`` the first call of the training loop plans, for its
    own batch; and whenever a larger batch comes, the first call after an optimizer's step does so again. With
    ``config.force_optimize`` a model that fits, and any model whose step cannot be simulated and does not fit, gets
    ``checkpoint()`` on its repeated blocks and what the config asks for by name. An optimizer is known by its first
    step, and has its states in 8 bits from then on where the plan says so (``use_8bit_optimizer``). A Hugging Face
    model's ``config.use_cache`` is off while wrapped, and its own activation checkpointing where the plan takes its
    place. What was decided is printed in a line, by the first process of a run; the hardware, the step and the plan are
    logged (logger ``memscale``, level INFO, and ``config.log_file``). Nothing of that is said without
    ``config.enable_logging``; `report` says it at any time. A model that is already wrapped is detached first.

    Args:
        target: an ``nn.Module``; or a Trainer of transformers (TRL's too) or of Lightning, whose model is wrapped
            whenever it trains; or another object whose ``.model`` is a module.
        config: what is allowed; None is ``Config()``. A field that nothing uses yet gives a warning when it is set.
        sample_input: what the model is called with (a tensor, a tuple of arguments or a mapping of keywords).
        async_offload: overrides ``config.async_offload``. None leaves it; where the config does not set it
            either, the environment variable ``MEMSCALE_ASYNC_OFFLOAD=1`` asks for it, where the config leaves
            offloading eligible.
        async_config: overrides ``config.async_config``: the sizes of the engine that offloads.
        budget: what a step may take, as in `memscale.plan`: ``"20GiB"``, a share of the device's memory, or bytes.
            None is ``config.target_gpu_utilization`` of the device.
        record: keep each step that is planned in the history, and what it is then seen to take; as in
            `memscale.profile`.

    Returns:
        ``target`` itself; the `Executor` is its model's ``_memscale_executor``.

    Raises:
        TypeError: ``target`` is neither a module nor a trainer.
        ConfigError: another argument is of the wrong type, ``async_offload=True`` meets
            ``enable_offloading=False``, ``log_file`` cannot be written, or ``verify_correctness`` has no
            ``sample_input`` or meets ``use_mixed_precision=True``.
        RuntimeUnavailable: the caller asked for something that this version does not have, or for offloading where
            nothing can move the tensors of the model's device; or the model is, or has inside it, an
            ``nn.DataParallel`` on several GPUs, an FSDP1 unit or PyTorch's ``CheckpointWrapper``. The environment
            variable is not the caller's word on this model, so it gives a logged warning instead.
        TransformError: a module inside ``target`` is wrapped on its own.
        CorrectnessError: ``verify_correctness`` found a number that differs; the model is left unwrapped.

    >>> import torch
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)]
    >>> model = wrap(torch.nn.Sequential(*layers), Config(force_optimize=True))
    memscale: checkpoint on 2 of 2 blocks; the step's peak under that is not known
    >>> model._memscale_executor
    Executor(Sequential, Plan({'*': checkpoint()}))
    >>> detach(model)
    """
    integration = _integration(target)
    if integration is not None:
        if sample_input is not None:
            batches.check_batch(sample_input)
        config = _config_in_force(config, async_offload, async_config)
        integration.wrap_trainer(target, config, sample_input, record, budget)
    else:
        wrapped(
            _module_of(target, "wrap"),
            config,
            sample_input=sample_input,
            async_offload=async_offload,
            async_config=async_config,
            budget=budget,
            record=record,
        )
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
) -> AbstractContextManager[Executor]:
    """Wrap ``model`` for the length of a ``with`` block, and ``optimizer`` with it; both are as before at its end.

    Also after an exception. What a plan may do to the optimizer is in `docs/wrap.md`: it is done in place, and at the
    end the optimizer has its own step and, as its own, the states that it has by then. The call itself wraps: without
    ``with``, the model stays wrapped until `detach`.

    Args:
        model: as `wrap`'s ``target``.
        optimizer: the one that trains ``model``; the step is planned with it. None: as in `wrap`.
        config: as in `wrap`.
        sample_input, budget, record: as in `wrap`.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``; and all that `wrap` raises.

    >>> with optimize(torch.nn.Linear(2, 2)) as executor:
    ...     print(executor.skipped.partition(":")[0])
    the step fits
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimize(optimizer=...) must be a torch.optim.Optimizer or None, "
            f"got {type(optimizer).__name__}; pass the optimizer itself"
        )
    module = _module_of(model, "optimize")
    executor = wrapped(module, config, sample_input=sample_input, optimizer=optimizer, budget=budget, record=record)
    return _Block(executor)


class _Block(AbstractContextManager[Executor]):
    """The block of a ``with``, at whose end the model is detached; it keeps the model, as an executor does not."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.model = executor, executor.model

    def __enter__(self) -> Executor:
        return self.executor

    def __exit__(self, *_: object) -> None:
        self.executor.detach()


@counted("detach")
def detach(model: Any) -> None:
    """Take off what `wrap` put on ``model``: every attribute is the object that it was before.

    A model that is not wrapped gets a logged warning.

    Raises:
        TypeError: ``model`` is neither a module nor a trainer.

    >>> import torch
    >>> detach(wrap(torch.nn.Linear(2, 2)))
    """
    if (integration := _integration(model)) is not None:
        integration.unwrap_trainer(model)
        return
    module = _module_of(model, "detach")
    executor = attached(module)
    if executor is None:
        LOG.warning("detach(): this %s is not wrapped; nothing to undo", type(module).__name__)
    else:
        executor.detach()


def report(model: Any) -> None:
    """Print what `wrap` applied to ``model``, what the step was predicted to take, and what was measured of it.

    Args:
        model: as `wrap`'s ``target``; of one that was detached, as a trainer does when it ends, what held until then.

    Raises:
        TypeError: ``model`` is neither a module nor a trainer.

    >>> report(torch.nn.Linear(2, 2))
    this Linear is not wrapped
    """
    module = _module_of(model, "report")
    executor = attached(module)
    if executor is not None:
        print(executor)
    elif module in DETACHED:
        print(f"detached; while it was wrapped:\n{DETACHED[module]}")
    else:
        print(f"this {type(module).__name__} is not wrapped")


def attached(model: nn.Module) -> Executor | None:
    """The executor of a model that is wrapped, None of any other."""
    executor = model.__dict__.get(ATTRIBUTE)
    # A tree that `transform` made from a wrapped model lists the executor, which is the other tree's.
    return executor if isinstance(executor, Executor) and executor.model is model else None


def wrapped(
    model: nn.Module,
    config: Config | None,
    *,
    sample_input: Any,
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
    budget: Budget | None = None,
    record: Record = None,
    keeps_output: bool = True,
) -> Executor:
    """What `wrap` does with a module, under `plan` if there is one; `optimizer` trains it, where that is known."""
    history = history_path(record)
    config = _config_in_force(config, async_offload, async_config)
    if sample_input is not None:
        batches.check_call(model, sample_input)
    if config.verify_correctness and sample_input is None:
        raise ConfigError(
            "Config(verify_correctness=True) compares real steps and needs a batch; pass sample_input=..."
        )
    config, runtime = with_runtime(model, config, ask_environment=async_offload is None)
    if isinstance(model, torch.jit.ScriptModule):
        raise TransformError(
            "wrap(): the model is a torch.jit.ScriptModule, whose forward runs in C++; wrap the Python module"
        )
    for path, module in model.named_modules():
        if path and ATTRIBUTE in module.__dict__:
            raise TransformError(f"module {path!r} inside the model is wrapped on its own; detach it first")
        for kind, reason in _OTHERS.items():
            # By name: whose class it is may not be imported, or be a copy of PyTorch's.
            if type(module).__name__ == kind and len(getattr(module, "device_ids", (0, 1))) > 1:
                raise RuntimeUnavailable(f"wrap(): the module {path!r} is a {kind}, {reason}")
    if (previous := attached(model)) is not None:
        say(config, f"{type(model).__name__} is wrapped already: detaching it to plan again")
        previous.detach()
    hardware = hardware_of(model)
    if budget is not None:
        budget = budget_bytes(budget, hardware.usable_bytes)
    say(config, f"hardware: {hardware}")
    if (missing := without_8_bits(config)) is not None:
        LOG.warning("use_8bit_optimizer=True: states stay in full: %s", missing)
        config = dataclasses.replace(config, use_8bit_optimizer=False)
    terms = Terms(config, hardware, runtime, budget, history, keeps_output)
    if plan is None:
        verdict = decide(model, sample_input, optimizer, terms)
    else:
        verdict = Verdict(plan, None, resident_bytes(model, optimizer), for_all=True)
    executor = Executor(model, terms, verdict, optimizer, sample_input)
    try:
        executor.attach()
        if config.verify_correctness and verdict.skipped is None:
            check_same_numbers(model, executor.install, executor.uninstall, sample_input)
        else:
            executor.install()
        executor.install_optimizer()
    except BaseException:
        executor.detach()
        raise
    executor.report()
    executor.serve()
    return executor


def _integration(target: object) -> Any:
    """What knows how to wrap a trainer; None of anything else."""
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


def _config_in_force(
    config: Config | None, async_offload: bool | None, async_config: AsyncOffloadConfig | None
) -> Config:
    """The config with the arguments folded in, after everything that cannot be honoured was refused."""
    check_config(config)
    config = Config() if config is None else config
    if async_offload is not None:
        config = dataclasses.replace(config, async_offload=async_offload)
    if async_config is not None:
        config = dataclasses.replace(config, async_config=async_config)
    if config.verify_correctness and config.use_mixed_precision:
        raise ConfigError(
            "Config(verify_correctness=True, use_mixed_precision=True) contradict each other: the first compares bit "
            "for bit, and what the second allows rounds differently; leave one of the two unset"
        )
    if config.observability_port is not None:
        check_can_serve()
    if config.log_file is not None and config.enable_logging:
        try:
            with open(config.log_file, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise ConfigError(
                f"Config(log_file={config.log_file!r}) cannot be written ({error.strerror}); "
                f"pass a path in a folder that exists and is yours"
            ) from error
    return config
