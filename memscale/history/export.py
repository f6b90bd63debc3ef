"""Exports runs as JSON lines and CSV, and to experiment trackers that are installed."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from memscale.core import RuntimeUnavailable
from memscale.history.run import Run

_PROJECT = "memscale"


def to_json_lines(runs: Sequence[Run]) -> str:
    """Returns the runs as JSON, one line each, as `Run.from_json` reads them."""
    return "".join(f"{run.to_json()}\n" for run in runs)


def to_csv(runs: Sequence[Run]) -> str:
    """Returns the runs' figures as CSV; a cell that a spreadsheet would read as a formula is prefixed with ``'``."""
    rows = [run.summary() for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def to_mlflow(runs: Sequence[Run]) -> None:
    """Logs each run to the current tracking server of MLflow.

    Raises:
        RuntimeUnavailable: mlflow is not installed.
    """
    mlflow = _imported("mlflow")
    for run in runs:
        with mlflow.start_run(run_name=run.name):
            mlflow.set_tags(_texts(run))
            mlflow.log_metrics(_metrics(run))


def to_run_logger(runs: Sequence[Run], *, package: str) -> None:
    """Logs each run to Weights & Biases, or to a tracker whose package has the same functions.

    Raises:
        RuntimeUnavailable: `package` is not installed.
    """
    tracker = _imported(package)
    for run in runs:
        tracker.init(project=_PROJECT, name=run.name, config=_texts(run))
        tracker.log(_metrics(run))
        tracker.finish()


def to_tensorboard(runs: Sequence[Run]) -> None:
    """Writes each run's figures to ``runs/`` as scalars, the n-th run of a name at step n; needs tensorboard."""
    tensorboard = _imported("torch.utils.tensorboard", "tensorboard")
    steps: dict[str, int] = {}
    for run in runs:
        step = steps[run.name] = steps.get(run.name, -1) + 1
        writer = tensorboard.SummaryWriter(comment=f"-{run.name}".replace("/", "_"))
        for name, value in _metrics(run).items():
            writer.add_scalar(name, value, step)
        writer.close()


#: The formats and trackers of `memscale history export --to`.
TEXTS: Mapping[str, Callable[[Sequence[Run]], str]] = {"json": to_json_lines, "csv": to_csv}
TRACKERS: Mapping[str, Callable[[Sequence[Run]], None]] = {
    "mlflow": to_mlflow,
    "tensorboard": to_tensorboard,
    "trackio": partial(to_run_logger, package="trackio"),
    "wandb": partial(to_run_logger, package="wandb"),
}


def _metrics(run: Run) -> dict[str, float]:
    profile = run.profile
    found = {
        "memscale/peak_bytes/predicted": profile.peak_bytes,
        "memscale/reserved_peak_bytes/predicted": profile.reserved_peak_bytes,
        "memscale/step_seconds/predicted": profile.step_seconds,
        **{f"memscale/{name}/measured": value for name, value in run.measured.items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _texts(run: Run) -> dict[str, str]:
    return {name: str(value) for name, value in run.summary().items() if not isinstance(value, (int, float))}


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _imported(module: str, package: str | None = None) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeUnavailable(
            f"{package or module} is not installed; pip install {package or module}, or export to csv or json"
        ) from error
