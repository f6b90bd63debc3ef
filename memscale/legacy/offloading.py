"""Decides whether `wrap` offloads, and with which runtime, from the arguments, the config and the environment."""

from __future__ import annotations

import dataclasses
import os

from torch import nn

from memscale.config import Config
from memscale.core import ConfigError, RuntimeUnavailable
from memscale.legacy.log import LOG
from memscale.runtime import AsyncOffloadConfig, Runtime

_VARIABLE = "MEMSCALE_ASYNC_OFFLOAD"


def with_runtime(model: nn.Module, config: Config, *, ask_environment: bool) -> tuple[Config, Runtime | None]:
    """Returns the config with the environment applied, and the runtime with which ``wrap`` offloads ``model`` or None.

    The caller asks for offloading by a field that is set; a mode only makes it eligible for a planner. The environment
    variable counts only if the caller left ``async_offload`` open. It gives way to a config without offloading, and
    never makes ``wrap`` fail.

    Args:
        model: the model to offload.
        config: the config with the caller's arguments applied.
        ask_environment: whether the caller's arguments left ``async_offload`` open; the config may still set it.

    Raises:
        ConfigError: the environment variable is neither yes nor no.
        RuntimeUnavailable: the caller asks for offloading, and no backend moves tensors of the model's devices.
    """
    asking = [name for name in ("async_offload", "enable_offloading") if name in config.given and getattr(config, name)]
    settled = config
    if ask_environment and "async_offload" not in config.given and _environment_asks():
        if "offload" not in config.eligible():
            LOG.warning("%s is set, but %r rules offloading out; this model runs without it", _VARIABLE, config)
            return config, None
        settled = dataclasses.replace(config, async_offload=True)
    if not asking and settled is config:
        return config, None
    try:
        return settled, _new_runtime(model, settled)
    except RuntimeUnavailable as error:
        if asking:
            asked = " and ".join(f"{name}=True" for name in asking)
            raise RuntimeUnavailable(f"{asked}: {error}; or leave that unset") from error
        LOG.warning("%s is set, but %s; this model runs without it", _VARIABLE, error)
        return config, None


def runtime_of_plan(model: nn.Module, config: Config) -> Runtime:
    """Returns the runtime, with overlap as planned, for a plan that offloads without the caller's request.

    Raises:
        RuntimeUnavailable: no backend moves tensors of the model's devices.
    """
    overlaps = config if "async_offload" in config.given else dataclasses.replace(config, async_offload=True)
    return _new_runtime(model, overlaps)


def why_none_moves(model: nn.Module, config: Config) -> str | None:
    """Returns why no backend moves tensors of the model's devices; None if one does."""
    try:
        _new_runtime(model, config)
    except RuntimeUnavailable as error:
        return str(error)
    return None


def _new_runtime(model: nn.Module, config: Config) -> Runtime:
    sizes = config.async_config or AsyncOffloadConfig()
    if not config.async_offload:
        sizes = dataclasses.replace(sizes, prefetch_depth=0)
    runtime = Runtime(sizes, host_bytes=config.host_bytes)
    for device, parameter in {parameter.device: parameter for parameter in model.parameters()}.items():
        # Engines are made now, so that an error comes now. A CPU always has an engine, and one made before a fork would
        # be useless after it; a model on meta does not show where it will train.
        if device.type not in ("cpu", "meta"):
            runtime.engine(parameter)
    return runtime


def _environment_asks() -> bool:
    value = os.environ.get(_VARIABLE, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{_VARIABLE}={value!r} must be 1 or 0 (true/false, yes/no, on/off); set one of these")


def moved_text(runtime: Runtime) -> str:
    """Returns one line about what a runtime has moved so far."""
    # Engines of simulated devices count bytes without moving them.
    engines = [stats for device, stats in runtime.stats().items() if not device.startswith("fake ")]
    out_bytes = sum(sum(stats.out_bytes.values()) for stats in engines)
    in_bytes = sum(sum(stats.in_bytes.values()) for stats in engines)
    exposed_seconds = sum(stats.exposed_seconds for stats in engines)
    return f"offloaded so far: {out_bytes} bytes out, {in_bytes} bytes in, {exposed_seconds:.3f} s exposed"
