"""Adding a run from a training script, which it must never stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from memscale.algebra import Plan
from memscale.core import ConfigError
from memscale.history.database import VARIABLE, History
from memscale.history.run import Run
from memscale.simulation import Profile

_log = logging.getLogger(__name__)


def record(
    profile: Profile,
    name: str,
    *,
    plan: Plan | None = None,
    measured: Mapping[str, float] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Run | None:
    """Add a run to the history and return it; None where there is no history, or where it could not be written.

    Whatever is wrong with the history, a script goes on: it is logged.

    >>> import torch, memscale as ms
    >>> profile = ms.profile(torch.nn.Linear(64, 64), torch.ones(8, 64), loss=lambda y, _: y.sum())
    >>> ms.history.record(profile, "layer", path="/proc/no-such-folder/runs.db") is None
    True

    Args:
        profile, name, plan, measured: as in `Run.of`.
        path: of the history's file; None is ``$MEMSCALE_HISTORY``, and without that nothing is recorded.

    Raises:
        ConfigError, PlanError: as `Run.of`, which is about the call.
    """
    if path is None and not os.environ.get(VARIABLE):
        return None
    run = Run.of(profile, name, plan=plan, measured=measured)
    try:
        with History(path) as history:
            history.add(run)
    except (ConfigError, OSError) as error:
        _log.warning("this run is not recorded: %s", error)
        return None
    return run
