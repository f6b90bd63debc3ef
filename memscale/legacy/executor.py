"""`Executor`: what `wrap` did to one model, and how to undo it."""

from __future__ import annotations

import logging
import weakref
from datetime import datetime
from typing import Any

from torch import nn

from memscale.algebra import Former, Plan, install, uninstall
from memscale.config import Config
from memscale.core import TransformError, format_bytes
from memscale.hardware import Hardware
from memscale.runtime import Runtime
from memscale.simulation import Profile

ATTRIBUTE = "_memscale_executor"
_LOG = logging.getLogger("memscale")


class Executor:
    """What `wrap` did: its ``model``, ``plan``, ``config``, ``hardware``, ``profile``, ``skipped`` and ``runtime``.

    ``profile`` is that of the model's own step, and None where no ``sample_input`` told what the step is or where it
    failed. ``step_bytes`` is what that step takes or, without a profile, what stays on the device from step to step.
    ``skipped`` says why the plan is empty, and is None when it is not. ``runtime`` is what the plan's ``offload()``
    moves tensors with, and is None where nothing is offloaded, and after `detach`. ``str`` is a readable report, with
    what was moved so far. A deep copy or a pickle of a wrapped model carries an executor of its own, without the
    profile, which detaches the copy; a deep copy shares the runtime, a pickle makes one with the same settings.
    An executor does not keep its model alive, and once that is gone has only its report.

    >>> import torch, memscale as ms
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    >>> model = torch.nn.Sequential(*blocks)
    >>> config = ms.Config(force_optimize=True, enable_logging=False)
    >>> ms.wrap(model, config)._memscale_executor.plan
    Plan({'*': checkpoint()})
    >>> ms.detach(model)
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        config: Config,
        hardware: Hardware,
        profile: Profile | None,
        step_bytes: int,
        skipped: str | None,
        runtime: Runtime | None,
    ) -> None:
        # Weakly: the executor is an attribute of the model, and a cycle would hold its weights.
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self.plan = plan
        self.config = config
        self.hardware = hardware
        self.profile = profile
        self.step_bytes = step_bytes
        self.skipped = skipped
        self.runtime = runtime
        self._caching: list[Any] = []
        self._before: list[Former] = []

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            TransformError: it is gone: an executor does not keep it alive.
        """
        model = self._model()
        if model is None:
            raise TransformError("the model of this executor is gone; keep the model as long as you need its executor")
        return model

    def detach(self) -> None:
        """Undo everything; does nothing the second time.

        >>> import torch
        >>> from memscale.legacy.verbs import wrap
        >>> model = torch.nn.Linear(2, 2)
        >>> before = dict(model.__dict__)
        >>> wrap(model)._memscale_executor.detach()
        >>> model.__dict__ == before
        True
        """
        if self.model.__dict__.get(ATTRIBUTE) is not self:
            return
        self.uninstall()
        for settings in self._caching:
            settings.use_cache = True
        del self.model.__dict__[ATTRIBUTE]
        moved = "" if self.runtime is None else f"; {_moved(self.runtime)}"
        self.runtime = None
        say(self.config, f"detached {self._kind}{moved}")

    def attach(self) -> None:
        """Enter the executor into the model and turn Hugging Face caches off."""
        self.model.__dict__[ATTRIBUTE] = self
        self._caching = _caching_settings(self.model)
        for settings in self._caching:
            settings.use_cache = False
            say(
                self.config,
                f"{type(settings).__name__}.use_cache is False while wrapped; detach() restores it",
            )

    def install(self) -> None:
        """Put the plan's regions on the model."""
        self._before = install(self.model, self.plan, runtime=self.runtime)

    def uninstall(self) -> None:
        """Take the plan's regions off, and leave what `attach` did."""
        uninstall(self._before)
        self._before = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": self.model, "profile": None}  # of the step of another model, and long

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._model = weakref.ref(state["_model"])

    def step_text(self) -> str:
        """What the untransformed step takes, in a line."""
        if self.profile is None:
            return f"step without memscale: {format_bytes(self.step_bytes)} and activations, which are not known"
        return f"step without memscale: {format_bytes(self.step_bytes)} at its peak, {self.profile.moment}"

    def __repr__(self) -> str:
        return f"Executor({self._kind}, {self.plan!r})"

    def __str__(self) -> str:
        verdict = str(self.plan) if self.skipped is None else f"skipped: {self.skipped}"
        lines = [f"{self._kind} on {self.hardware}", self.step_text(), verdict]
        if self.runtime is not None:
            lines.append(_moved(self.runtime))
        return "\n".join(lines)


def _moved(runtime: Runtime) -> str:
    # Nothing moves on a simulated device, whatever its engine counts.
    engines = [stats for device, stats in runtime.stats().items() if not device.startswith("fake ")]
    out_bytes = sum(sum(stats.out_bytes.values()) for stats in engines)
    in_bytes = sum(sum(stats.in_bytes.values()) for stats in engines)
    exposed_seconds = sum(stats.exposed_seconds for stats in engines)
    return f"offloaded so far: {out_bytes} bytes out, {in_bytes} bytes in, {exposed_seconds:.3f} s exposed"


def _caching_settings(model: nn.Module) -> list[Any]:
    """The model's Hugging Face configs, nested ones too, that have ``use_cache`` on.

    A cache that is filled again by a recompute holds every key twice.
    """
    found: dict[int, Any] = {}
    pending = [vars(module).get("config") for module in model.modules()]
    seen: set[int] = set()
    while pending:
        settings = pending.pop()
        if id(settings) in seen or not hasattr(settings, "__dict__") or isinstance(settings, (type, nn.Module)):
            continue
        seen.add(id(settings))
        if vars(settings).get("use_cache") is True:
            found[id(settings)] = settings
        pending += [value for key, value in vars(settings).items() if key.endswith("config")]
    return list(found.values())


def say(config: Config, message: str) -> None:
    """One log record, and the same text in ``config.log_file``."""
    if not config.enable_logging:
        return
    _LOG.info(message)
    if config.log_file is not None:
        # Opened for each message: nothing stays open when a wrapped model is dropped, copied or pickled.
        try:
            with open(config.log_file, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(timespec='seconds')} {message}\n")
        except OSError as error:
            _LOG.warning("log_file %s cannot be written any more: %s", config.log_file, error)
