"""Adding a run from a training script, which it must never stop."""

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

_MOST_SHAPES = 4  # in a name

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
    """Add a run to the history and return it; None where there is no history, or where it could not be written.

    Whatever is wrong with the history, a script goes on: it is logged.

    >>> import torch, memscale as ms
    >>> profile = ms.profile(torch.nn.Linear(64, 64), torch.ones(8, 64), loss=lambda y, _: y.sum())
    >>> ms.history.record(profile, "layer", path="/proc/no-such-folder/runs.db") is None
    True

    Args:
        profile, name, plan, measured, model, batch, config: as in `Run.of`.
        path: of the history's file; None is ``$MEMSCALE_HISTORY``, and without that nothing is recorded. The address
            of a project on a server, ``"https://..."``, sends the run there, from a file in which it waits.

    Raises:
        ConfigError, PlanError: as `Run.of`, which is about the call.
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
    """`record` for a verb with ``record=...``: the run has a name of what the verb was given, and nothing is raised.

    `options` are what else decides the step; those that are None, or 1, are the usual and go without saying.
    """
    if rank():  # the first process speaks for all
        return None
    shapes = ["x".join(map(str, tensor.shape)) for tensor in tensors(batch)[:_MOST_SHAPES]]
    kind = getattr(model, "__qualname__", type(model).__qualname__)
    told = [f"{name}={value}" for name, value in options.items() if value not in (None, 1)]
    words = [kind, *shapes, *([] if optimizer is None else [type(optimizer).__name__]), *told]
    try:
        run = Run.of(profile, " ".join(words), plan=plan, model=model, batch=batch, config=config)
    except Exception as error:  # a plan with a policy of the caller's own has no JSON form, or fails to make one
        _log.warning("this run is not recorded: %s", error)
        return None
    return _added(run, path)


def keep_measured(run: Run, path: str, measured: Mapping[str, float]) -> Run | None:
    """Add what was measured to a run that was recorded."""
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
