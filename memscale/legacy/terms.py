"""`Terms`: what the caller of `wrap` asks for: the config in force, the budget, the loop, and the offloading."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from torch import nn

from memscale.config import Config, check_config
from memscale.core import ConfigError, Record, RuntimeUnavailable, budget_bytes, format_bytes, history_path
from memscale.hardware import Hardware
from memscale.legacy.log import LOG
from memscale.legacy.optimizing import without_8_bits
from memscale.observability import check_can_serve
from memscale.planning import Budget
from memscale.runtime import AsyncOffloadConfig, Runtime
from memscale.simulation import Loop

_VARIABLE = "MEMSCALE_ASYNC_OFFLOAD"


@dataclass(frozen=True, eq=False)
class Terms:
    """The settings of one `wrap`, the same for every batch.

    Attributes:
        config: the allowed techniques.
        hardware: the model's device.
        loop: the caller's loop.
        runtime: the one runtime of all plans that move tensors; None after `detach`.
        offloads: whether the caller asks for offloading by name; otherwise plans may choose it.
        budget: the bytes that a step may take; None is the config's share of the device.
        history: the file in which planned steps are recorded, or None.
        unseen_bytes: what the real step was measured to take beyond the simulated one.
        may_step: whether plans may change how the optimizer steps, which is so where the caller gave it.
    """

    config: Config
    hardware: Hardware
    loop: Loop
    runtime: Runtime | None
    offloads: bool
    budget: int | None = None
    history: str | None = None
    unseen_bytes: int = 0
    may_step: bool = False

    @property
    def limit(self) -> tuple[int, str]:
        """The bytes that a simulated step may take, and the name of the setting that says so."""
        if self.budget is not None:
            limit, said = self.budget, "the budget"
        else:
            share = self.config.target_gpu_utilization
            limit = min(self.hardware.usable_bytes, int(share * self.hardware.memory_bytes))
            said = f"target_gpu_utilization={share}"
        if self.unseen_bytes:
            said = f"{said}, less {format_bytes(self.unseen_bytes)} that no simulation shows,"
            limit = max(1 << 20, limit - self.unseen_bytes)  # what else is on the card may take more than the limit
        return limit, said


def terms_of(model: nn.Module, config: Config, budget: Budget | None, record: Record, loop: Loop) -> Terms:
    """Returns the terms for `model`.

    Raises:
        ConfigError: `budget` or `record` is invalid, or the environment variable is neither yes nor no.
        RuntimeUnavailable: the caller asks for offloading, and no backend moves tensors of the model's devices.
    """
    history = history_path(record)
    config, runtime, offloads = _with_runtime(model, config)
    hardware = hardware_of(model)
    if (missing := without_8_bits(config)) is not None:
        LOG.warning("use_8bit_optimizer=True: states stay in full: %s", missing)
        config = dataclasses.replace(config, use_8bit_optimizer=False)
    limit = None if budget is None else budget_bytes(budget, hardware.usable_bytes)
    return Terms(config, hardware, loop, runtime, offloads, limit, history)


def hardware_of(model: nn.Module) -> Hardware:
    """Returns the device of `model`; for a model on ``meta``, the device at hand."""
    parameter = next(model.parameters(), None)
    return Hardware.detect(None if parameter is None or parameter.is_meta else parameter.device)


def config_in_force(
    config: Config | None, async_offload: bool | None = None, async_config: AsyncOffloadConfig | None = None
) -> Config:
    """Returns the config with the arguments of `wrap` as fields that the caller set.

    Raises:
        ConfigError: the config is no `Config`, contradicts itself or an argument, or its log file cannot be written.
        RuntimeUnavailable: the config asks for metrics, and prometheus-client is missing.
    """
    check_config(config)
    config = Config() if config is None else config
    arguments = {"async_offload": async_offload, "async_config": async_config}
    if given := {name: value for name, value in arguments.items() if value is not None}:
        config = Config(**{**{name: getattr(config, name) for name in config.given}, **given})
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


def _with_runtime(model: nn.Module, config: Config) -> tuple[Config, Runtime, bool]:
    """Returns the config with the environment applied, the runtime, and whether the caller asks for offloading.

    The caller asks for offloading by a field that is set; a mode only makes it eligible for a planner. The environment
    variable counts only if the caller left ``async_offload`` open. It gives way to a config without offloading, and
    never makes ``wrap`` fail.
    """
    asking = [name for name in ("async_offload", "enable_offloading") if name in config.given and getattr(config, name)]
    settled, offloads = config, bool(asking)
    if "async_offload" not in config.given and _environment_asks():
        if "offload" in config.eligible():
            settled, offloads = dataclasses.replace(config, async_offload=True), True
        else:
            LOG.warning("%s is set, but %r rules offloading out; this model runs without it", _VARIABLE, config)
    sizes = config.async_config or AsyncOffloadConfig()
    if not settled.async_offload and (offloads or "async_offload" in config.given):
        sizes = dataclasses.replace(sizes, prefetch_depth=0)  # otherwise copies overlap, as plans count on
    runtime = Runtime(sizes, host_bytes=config.host_bytes)
    if not offloads or (missing := why_none_moves(model, runtime)) is None:
        return settled, runtime, offloads
    if asking:
        asked = " and ".join(f"{name}=True" for name in asking)
        raise RuntimeUnavailable(f"{asked}: {missing}; or leave that unset")
    LOG.warning("%s is set, but %s; this model runs without it", _VARIABLE, missing)
    return config, runtime, False


def why_none_moves(model: nn.Module, runtime: Runtime) -> str | None:
    """Returns why no backend moves tensors of the model's devices; None if one does.

    Engines are made here, so that an error comes before training. A CPU always has an engine, and one made before a
    fork would be useless after it; a model on ``meta`` does not show where it will train.
    """
    for device, parameter in {parameter.device: parameter for parameter in model.parameters()}.items():
        if device.type not in ("cpu", "meta"):
            try:
                runtime.engine(parameter)
            except RuntimeUnavailable as error:
                return str(error)
    return None


def _environment_asks() -> bool:
    value = os.environ.get(_VARIABLE, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{_VARIABLE}={value!r} must be 1 or 0 (true/false, yes/no, on/off); set one of these")
