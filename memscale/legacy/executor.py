"""`Executor`: what `wrap` did to one model, and how to undo it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from torch import nn

from memscale.algebra.apply import install
from memscale.algebra.plan import Plan
from memscale.config import Config
from memscale.hardware.device import Hardware
from memscale.legacy.estimate import StepEstimate
from memscale.runtime import Runtime

ATTRIBUTE = "_memscale_executor"
_LOG = logging.getLogger("memscale")
_ABSENT = object()


class Executor:
    """What `wrap` did: its ``model``, ``plan``, ``config``, ``hardware``, ``estimate``, ``skipped`` and ``runtime``.

    ``skipped`` says why the plan is empty, and is None when it is not. ``runtime`` is what the plan's ``offload()``
    moves tensors with, and is None where nothing is offloaded, and after `detach`. ``str`` is a readable report, with
    what was moved so far. A deep copy or a pickle of a wrapped model carries an executor of its own, which detaches
    the copy; a deep copy shares the runtime, a pickle makes one with the same settings.

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
        estimate: StepEstimate,
        skipped: str | None,
        runtime: Runtime | None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.config = config
        self.hardware = hardware
        self.estimate = estimate
        self.skipped = skipped
        self.runtime = runtime
        self._caching: list[Any] = []
        self._undo: Callable[[], None] | None = None
        self._changed: list[tuple[str, str, list[Any]]] = []

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
        say(self.config, f"detached {type(self.model).__name__}{moved}")

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
        before = {path: dict(module.__dict__) for path, module in self.model.named_modules()}
        self._undo = install(self.model, self.plan, runtime=self.runtime)
        for path, module in self.model.named_modules():
            old, new = before[path], module.__dict__
            keys = [key for key in {**old, **new} if old.get(key, _ABSENT) is not new.get(key, _ABSENT)]
            self._changed += [(path, key, [old[key]] if key in old else []) for key in keys]

    def uninstall(self) -> None:
        """Take the plan's regions off, and leave what `attach` did."""
        if self._undo is not None:
            self._undo()
        else:
            # A copy of a wrapped model: `_undo` is bound to the original's modules, paths are not.
            for path, key, before in self._changed:
                namespace = self.model.get_submodule(path).__dict__
                if before:
                    namespace[key] = before[0]
                else:
                    namespace.pop(key, None)
        self._undo, self._changed = None, []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_undo": None}

    def __repr__(self) -> str:
        return f"Executor({type(self.model).__name__}, {self.plan!r})"

    def __str__(self) -> str:
        verdict = str(self.plan) if self.skipped is None else f"skipped: {self.skipped}"
        lines = [f"{type(self.model).__name__} on {self.hardware}", f"step: {self.estimate}", verdict]
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
