"""Adds runs to the history from a training script, without ever stopping the script."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import HISTORY, MemscaleError, tensors
from memscale.history.database import History
from memscale.history.run import Run
from memscale.history.sending import is_address, send_later
from memscale.observability import rank
from memscale.simulation import Profile

_MOST_SHAPES = 4  # shapes in a run's name

_log = logging.getLogger(__name__)


def record(
    profile: Profile,
    name: str,
    *,
    plan: Plan | None = None,
    measured: Mapping[str, float] | None = None,
    path: str | os.PathLike[str] | None = None,
    model: object = None,
    batch: Any = None,
    config: Config | None = None,
) -> Run | None:
    """Adds a run to the history and returns it, or None if there is no history or it cannot be written.

    A history that cannot be written is logged, and the script continues.

    >>> import torch, memscale as ms
    >>> profile = ms.profile(torch.nn.Linear(64, 64), torch.ones(8, 64), loss=lambda y, _: y.sum())
    >>> ms.history.record(profile, "layer", path="/proc/no-such-folder/runs.db") is None
    True

    Args:
        profile: as in `Run.of`.
        name: as in `Run.of`.
        plan: as in `Run.of`.
        measured: as in `Run.of`.
        path: the file of the history; None is ``$MEMSCALE_HISTORY``, and if that is not set nothing is recorded. The
            address of a project on a server, ``"https://..."``, sends the run there, through a local queue.
        model: as in `Run.of`.
        batch: as in `Run.of`.
        config: as in `Run.of`.

    Raises:
        ConfigError: as in `Run.of`.
        PlanError: as in `Run.of`.
    """
    if path is None and not os.environ.get(HISTORY):
        return None
    run = Run.of(profile, name, plan=plan, measured=measured, model=model, batch=batch, config=config)
    return _added(run, path)


def keep(
    profile: Profile,
    path: str,
    model: object,
    batch: Any,
    *,
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    **options: object,
) -> Run | None:
    """Records a run for a verb with ``record=...``, under a name made of the verb's arguments; raises nothing.

    `options` are further arguments that decide the step; values None and 1 are defaults and stay out of the name.
    """
    if rank():  # only the first process records
        return None
    shapes = ["x".join(map(str, tensor.shape)) for tensor in tensors(batch)[:_MOST_SHAPES]]
    kind = getattr(model, "__qualname__", type(model).__qualname__)
    settings = [f"{name}={value}" for name, value in options.items() if value not in (None, 1)]
    words = [kind, *shapes, *([] if optimizer is None else [type(optimizer).__name__]), *settings]
    try:
        run = Run.of(profile, " ".join(words), plan=plan, model=model, batch=batch, config=config)
    except Exception as error:  # for example a plan with a user's own policy, which has no JSON form
        _log.warning("this run is not recorded: %s", error)
        return None
    return _added(run, path)


def keep_measured(run: Run, path: str, measured: Mapping[str, float]) -> Run | None:
    """Adds measured figures to a recorded run, and records it again."""
    return _added(dataclasses.replace(run, measured={**run.measured, **measured}), path)


def _added(run: Run, path: str | os.PathLike[str] | None) -> Run | None:
    try:
        if is_address(path):
            send_later(run, str(path))
        else:
            with History(path) as history:
                history.add(run)
    except (MemscaleError, OSError) as error:
        _log.warning("this run is not recorded: %s", error)
        return None
    return run
