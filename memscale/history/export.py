"""Exports runs as JSON lines and CSV, and to experiment trackers that are installed: one function for each."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from memscale.core import package
from memscale.history.run import Run

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the first character of a cell that a spreadsheet would evaluate


def to_json_lines(runs: Sequence[Run]) -> str:
    """Returns the runs as JSON, one line each, as `Run.from_json` reads them."""
    return "".join(f"{run.to_json()}\n" for run in runs)


def to_csv(runs: Sequence[Run]) -> str:
    """Returns the runs' figures as CSV; a cell that a spreadsheet would read as a formula is prefixed with ``'``."""
    rows = [run.summary() for run in runs]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        formulas = {name for name, cell in row.items() if str(cell).startswith(_FORMULA) and isinstance(cell, str)}
        writer.writerow({name: f"'{cell}" if name in formulas else cell for name, cell in row.items()})
    return text.getvalue()


def to_mlflow(runs: Sequence[Run]) -> None:
    """Logs each run to the current tracking server of MLflow.

    Raises:
        RuntimeUnavailable: mlflow is not installed.
    """
    mlflow = package("mlflow", "--to mlflow")
    for run in runs:
        with mlflow.start_run(run_name=run.name):
            mlflow.set_tags(_texts(run))
            mlflow.log_metrics(_metrics(run))


def to_run_logger(runs: Sequence[Run], *, name: str) -> None:
    """Logs each run to Weights & Biases, or to a tracker whose package has the same functions.

    Raises:
        RuntimeUnavailable: the package `name` is not installed.
    """
    tracker = package(name, f"--to {name}")
    for run in runs:
        tracker.init(project="memscale", name=run.name, config=_texts(run))
        tracker.log(_metrics(run))
        tracker.finish()


def to_tensorboard(runs: Sequence[Run]) -> None:
    """Writes each run's figures to ``runs/`` as scalars, the n-th run of a name at step n; needs tensorboard."""
    package("tensorboard", "--to tensorboard")
    tensorboard = package("torch.utils.tensorboard", "--to tensorboard")
    steps = Counter[str]()
    for run in runs:
        writer = tensorboard.SummaryWriter(comment=f"-{run.name}".replace("/", "_"))
        for name, value in _metrics(run).items():
            writer.add_scalar(name, value, steps[run.name])
        writer.close()
        steps[run.name] += 1


#: The formats and trackers of `memscale history export --to`.
TEXTS: Mapping[str, Callable[[Sequence[Run]], str]] = {"json": to_json_lines, "csv": to_csv}
TRACKERS: Mapping[str, Callable[[Sequence[Run]], None]] = {
    "mlflow": to_mlflow,
    "tensorboard": to_tensorboard,
    "trackio": partial(to_run_logger, name="trackio"),
    "wandb": partial(to_run_logger, name="wandb"),
}


def _metrics(run: Run) -> dict[str, float]:
    predicted = {name: getattr(run.profile, name) for name in ("peak_bytes", "reserved_peak_bytes", "step_seconds")}
    found = {f"memscale/{name}/predicted": value for name, value in predicted.items() if value is not None}
    return {**found, **{f"memscale/{name}/measured": value for name, value in run.measured.items()}}


def _texts(run: Run) -> dict[str, str]:
    return {name: str(value) for name, value in run.summary().items() if not isinstance(value, (int, float))}
