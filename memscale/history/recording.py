"""Adds runs to the history from a training script, without ever stopping the script."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import HISTORY, MemscaleError, state_folder, tensors
from memscale.history.database import History
from memscale.history.remote import Remote, send
from memscale.history.run import Run
from memscale.observability import rank
from memscale.simulation import Profile

_MOST_SHAPES = 4  # shapes in a run's name

_log = logging.getLogger(__name__)
_sending = threading.Lock()


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
        profile, name, plan, measured, model, batch, config: as in `Run.of`.
        path: the file of the history; None is ``$MEMSCALE_HISTORY``, and if that is not set nothing is recorded. The
            address of a project on a server, ``"https://..."``, sends the run there, through a local queue.

    Raises:
        ConfigError: as in `Run.of`.
        PlanError: as in `Run.of`.
    """
    if path is None and not os.environ.get(HISTORY):
        return None
    return _added(Run.of(profile, name, plan=plan, measured=measured, model=model, batch=batch, config=config), path)


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
        return record(profile, " ".join(words), path=path, plan=plan, model=model, batch=batch, config=config)
    except MemscaleError as error:  # a plan with a user's own policy has no JSON form
        _log.warning("this run is not recorded: %s", error)
        return None


def keep_measured(run: Run, path: str, measured: Mapping[str, float]) -> Run | None:
    """Adds measured figures to a recorded run, and records it again."""
    return _added(dataclasses.replace(run, measured={**run.measured, **measured}), path)


def is_address(place: object) -> bool:
    """Whether `place` is the address of a server rather than a file."""
    return isinstance(place, str) and place.startswith(("https://", "http://"))


def queue_path() -> Path:
    """Returns the file in which runs wait: ``$MEMSCALE_HISTORY``, or a file in the user's state folder."""
    chosen = os.environ.get(HISTORY)
    return Path(chosen) if chosen else state_folder() / "history.db"


def _added(run: Run, path: str | os.PathLike[str] | None) -> Run | None:
    try:
        url = Remote(str(path)).url if is_address(path) else None
        with History(path if url is None else queue_path()) as history:
            history.add(run, send_to=url)
    except (MemscaleError, OSError) as error:
        _log.warning("this run is not recorded: %s", error)
        return None
    if url is not None:
        threading.Thread(target=_send_waiting, name="memscale-history", daemon=True).start()
    return run


def _send_waiting() -> None:
    try:
        with _sending, History(queue_path()) as history:
            for run, said in send(history):
                _log.debug("%s: %s", run.id, said)
    except (MemscaleError, OSError) as error:
        _log.info("runs wait in %s: %s", queue_path(), error)
