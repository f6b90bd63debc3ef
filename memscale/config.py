"""`Config`: the settings of `wrap` and of planning, frozen and validated."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from fractions import Fraction
from typing import Any

import torch

from memscale.core import SWITCHES, Check, ConfigError, Misfit, boolean, integer, optional, shown, validate
from memscale.runtime import AsyncOffloadConfig

_MAX_PORT = 65535


class OptimizationMode(enum.Enum):
    """The techniques that a plan may use; each mode allows those of the one before it, and more.

    >>> OptimizationMode("aggressive")
    OptimizationMode.AGGRESSIVE
    """

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


# The transforms that each mode allows; their switches follow from the mode unless the caller sets them.
_ALLOWED = {
    OptimizationMode.CONSERVATIVE: ("checkpoint",),
    OptimizationMode.BALANCED: ("checkpoint", "offload"),
    OptimizationMode.AGGRESSIVE: ("checkpoint", "offload", "tile"),
}
_OF_MODES = {SWITCHES[name]: name for name in _ALLOWED[OptimizationMode.AGGRESSIVE]}

_OPEN = ("mode", *_OF_MODES, "async_offload")  # the fields that follow from the others unless they are set
_FOLLOWS: Any = None  # the default of these fields


def _real(rule: str, remedy: str, holds: Callable[[float], bool]) -> Check:
    def check(value: object) -> float | int:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise Misfit(f"must be a number {rule}; {remedy}")
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        if (isinstance(number, float) and not math.isfinite(number)) or not holds(number):
            raise Misfit(f"must be {rule}; {remedy}")
        return number

    return check


def _mode(value: object) -> OptimizationMode:
    if isinstance(value, OptimizationMode):
        return value
    names = ", ".join(repr(mode.value) for mode in OptimizationMode)
    if isinstance(value, str):
        try:
            return OptimizationMode(value.strip().lower())
        except ValueError:
            raise Misfit(f"must be one of {names} (any case); use one of these") from None
    raise Misfit(f"must be an OptimizationMode or one of {names}; use one of these")


def _path(value: object) -> str:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise Misfit("must be a str or a path; pass the file's path, or None for no file")
    if not text.strip():
        raise Misfit("must not be empty; pass the file's path, or None for no file")
    return text


def _port(value: object) -> int | str:
    if not isinstance(value, str):
        number: int = integer(0, _MAX_PORT)(value)
        return number
    address, _, digits = value.rpartition(":")
    if not address or not digits.isdecimal() or int(digits) > _MAX_PORT:
        raise Misfit("must be a port, or an address and a port such as '0.0.0.0:9464'; 0 is any free port")
    return value


def _async_config(value: object) -> AsyncOffloadConfig:
    if isinstance(value, AsyncOffloadConfig):
        return value
    raise Misfit("must be an AsyncOffloadConfig or None; build one with AsyncOffloadConfig(...)")


@dataclass(frozen=True, repr=False)
class Config:
    """The settings of :func:`memscale.wrap` and of `memscale.plan`: frozen, validated, never changed by memscale.

    The mode sets the three switches ``enable_checkpointing``, ``enable_offloading`` and ``enable_tiling``
    (conservative: the first; balanced: the first two; aggressive: all three). A switch that the caller sets takes
    precedence over the mode, and so does ``async_offload=True``, which sets ``enable_offloading``. A field with the
    default `None` follows from the others: the mode is balanced, a switch is as the mode sets it, ``async_offload`` is
    `False`. ``repr`` shows the fields that the caller set, as Python that makes an equal config.

    `dataclasses.replace` keeps what the caller set. It cannot tell a value that equals the present one from no value: a
    switch that is to be the same under every mode is set in ``Config(...)`` itself.

    Args:
        mode: an :class:`OptimizationMode` or its name in any case; balanced by default.
        enable_checkpointing: activations may be recomputed in backward instead of kept.
        enable_offloading: tensors may be moved to another memory tier and back.
        enable_tiling: wide layers may run in tiles.
        use_mixed_precision: regions may run in a lower precision. Not exact.
        use_8bit_optimizer: optimizer states may be kept in 8 bits. Not exact.
        max_cpu_offload_gb: hard cap on offloaded host memory, in GB of 10**9 bytes; `None` is no cap.
        target_gpu_utilization: share of the device's memory that a step may fill, above 0 and at most 1.
        force_optimize: transform even a model that fits comfortably, by rule.
        use_static_profiling: measure by simulation, without running the model.
        use_empirical_fallback: measure a real step where simulation cannot.
        warmup_steps: real steps to run before measuring one.
        enable_logging: print the decision in one line; log the hardware, the plan and skipped parts, at level INFO.
        log_file: path of a file to which the same lines are appended; `None` is no file.
        observability_port: local port that serves live metrics for Prometheus, 0 for any free one, or
            ``"address:port"`` to be reachable from other machines; `None` serves nothing.
        verify_correctness: verify the wrapped model's numbers on ``sample_input`` before returning it.
        async_offload: move tensors while the device computes. Not with ``enable_offloading=False``.
        async_config: sizes of the copy engine; `None` uses the defaults of :class:`AsyncOffloadConfig`.
        auto_policy: let a policy choose which exact transforms are tried first; switches that the caller set stay the
            same. `False` uses the config exactly as given.

    Raises:
        ConfigError: fields are of the wrong type, out of range or unknown (the message lists all of them), or two
            fields contradict each other.

    >>> config = Config(mode="aggressive", enable_offloading=False)
    >>> sorted(config.eligible())
    ['checkpoint', 'tile']
    >>> config
    Config(mode=OptimizationMode.AGGRESSIVE, enable_offloading=False)
    """

    mode: OptimizationMode | str = _FOLLOWS
    enable_checkpointing: bool = _FOLLOWS
    enable_offloading: bool = _FOLLOWS
    enable_tiling: bool = _FOLLOWS
    use_mixed_precision: bool = False
    use_8bit_optimizer: bool = False
    max_cpu_offload_gb: float | None = None
    target_gpu_utilization: float = 0.85
    force_optimize: bool = False
    use_static_profiling: bool = True
    use_empirical_fallback: bool = True
    warmup_steps: int = 2
    enable_logging: bool = True
    log_file: str | os.PathLike[str] | None = None
    observability_port: int | str | None = None
    verify_correctness: bool = False
    async_offload: bool = _FOLLOWS
    async_config: AsyncOffloadConfig | None = None
    auto_policy: bool = False
    follows: InitVar[Mapping[str, object] | None] = None
    """The values of the fields that the caller did not set; `dataclasses.replace` passes it on, so they stay unset."""

    def __post_init__(self, follows: Mapping[str, object] | None) -> None:
        validate(self, _CONFIG_CHECKS)
        before = follows or {}
        left_open = {name for name in _OPEN if getattr(self, name) in (None, before.get(name))}
        resolved = _resolved({name: None if name in left_open else getattr(self, name) for name in _OPEN})
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "follows", {name: resolved[name] for name in sorted(left_open)})

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that the caller set; the others have their defaults or follow the mode.

        >>> import dataclasses
        >>> sorted(dataclasses.replace(Config(warmup_steps=3), mode="conservative").given)
        ['mode', 'warmup_steps']
        """
        follows: Mapping[str, object] = self.__dict__["follows"]
        fields = dataclasses.fields(self)
        return frozenset(
            each.name for each in fields if each.name not in follows and getattr(self, each.name) != each.default
        )

    @property
    def host_bytes(self) -> int | None:
        """`max_cpu_offload_gb` in bytes.

        >>> Config(max_cpu_offload_gb=0.3).host_bytes
        300000000
        """
        # As a fraction: a float of this size may overflow, and 0.3 means exactly 0.3.
        gigabytes = self.max_cpu_offload_gb
        return None if gigabytes is None else int(Fraction(str(gigabytes)) * 10**9)

    def eligible(self) -> frozenset[str]:
        """Returns the names of the transforms that a plan under this config may use.

        >>> sorted(Config(mode="conservative").eligible())
        ['checkpoint']
        >>> sorted(Config(mode="conservative", enable_offloading=True).eligible())
        ['checkpoint', 'offload']
        """
        return frozenset(name for name, switch in SWITCHES.items() if getattr(self, switch))

    def __repr__(self) -> str:
        fields = (field.name for field in dataclasses.fields(self) if field.name in self.given)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the fields in `given`, with each `None` replaced by what follows from the others."""
    mode = OptimizationMode.BALANCED if given["mode"] is None else given["mode"]
    found = {
        switch: name in _ALLOWED[mode] if given[switch] is None else given[switch] for switch, name in _OF_MODES.items()
    }
    overlaps = bool(given["async_offload"])
    if overlaps and given["enable_offloading"] is False:
        raise ConfigError(
            "Config(async_offload=True, enable_offloading=False) contradict each other: the first asks for what the "
            "second rules out; leave one of the two unset"
        )
    found["enable_offloading"] |= overlaps
    return {"mode": mode, **found, "async_offload": overlaps}


def _refusing_unknown(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: Config, *args: Any, **given: Any) -> None:
        names = [each.name for each in dataclasses.fields(Config)]
        lines = []
        for name in sorted(given.keys() - {*names, "follows"}):
            near = difflib.get_close_matches(name, names, 1, 0.6)
            remedy = f"write {near[0]}={given[name]!r}" if near else f"its fields are {', '.join(names)}"
            lines.append(f"Config({name}={given[name]!r}) is no field of it; {remedy}")
        if lines:
            raise ConfigError("; ".join(lines))
        init(self, *args, **given)

    return checked


setattr(Config, "__init__", _refusing_unknown(Config.__init__))  # noqa: B010  # mypy forbids a plain assignment

_CONFIG_CHECKS: dict[str, Check] = {
    **{each.name: boolean for each in dataclasses.fields(Config) if each.type == "bool"},
    **{name: optional(boolean) for name in _OPEN},
    "mode": optional(_mode),
    "max_cpu_offload_gb": optional(
        _real("finite and at least 0", "pass GB of 10**9 bytes, or None for no cap", lambda gb: gb >= 0)
    ),
    "target_gpu_utilization": _real("above 0 and at most 1", "pass a share such as 0.85", lambda share: 0 < share <= 1),
    "warmup_steps": integer(0),
    "log_file": optional(_path),
    "observability_port": optional(_port),
    "async_config": optional(_async_config),
}


def as_code(fields: Mapping[str, object]) -> str:
    """Returns the Python that makes a config with `fields`."""
    return f"Config({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def check_config(config: object) -> None:
    """Checks that `config` is a `Config` or `None`.

    Raises:
        ConfigError: `config` is neither; the message says what to write for a mode, or for fields in a dictionary.
    """
    if config is None or isinstance(config, Config):
        return
    mode = config.value if isinstance(config, OptimizationMode) else config
    fields = {"mode": mode} if isinstance(mode, str) else config if isinstance(config, Mapping) else {}
    instead = f"write {as_code(fields)}" if fields else "build one with Config(...)"
    if isinstance(config, torch.Tensor):
        instead = "a sample batch is given by its name: sample_input=..."
    elif type(config) in (int, float) or (isinstance(config, str) and config[:1].isdigit()):
        instead = f"a budget is given by its name: budget={config!r}"
    raise ConfigError(f"config={shown(config)} must be a memscale.Config or None; {instead}")
