"""``memscale predict``: whether a training step fits on a card, from the model's config alone."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from memscale.algebra import Plan
from memscale.cli.subject import DTYPES, Subject, read_subject
from memscale.core import BudgetError, ConfigError, MemscaleError
from memscale.hardware import Hardware
from memscale.planning import Budget, LargestBatch, OOMPrediction, OOMPredictor, parts_of, planned, shorthands
from memscale.simulation import as_hardware

DOES_NOT_FIT = 3

_MOST = 2**20
# They need what a plain loop does not have: a closure that runs the step, sparse gradients.
_NOT_OPTIMIZERS = ("optimizer", "lbfgs", "sparseadam")


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line of ``memscale predict``, as typed."""

    hf: str
    batch: int
    seq: int | None
    optimizer: str
    gpu: str | None
    dtype: str | None
    plan: str | None
    accumulate: int
    budget: str | None
    largest: str | None
    recommend: bool | None
    as_json: bool
    html: Path | None
    plot: Path | None


def predict(options: Options) -> int:
    """Predict, print, write the pictures; return 0 if the step fits, 3 if it does not.

    Raises:
        ConfigError: an option is wrong.
        RuntimeUnavailable: a package is not there, or the step can be neither simulated nor run here.
    """
    _check(options)
    # What cannot be simulated is recorded by Kineto, which logs to stderr, through the bar; see `demo`.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    hardware = as_hardware(options.gpu, "meta")
    subject = read_subject(options.hf, None if options.dtype is None else DTYPES[options.dtype.lower()])
    seq = subject.seq(options.seq)
    if options.largest is not None:
        _check_axis(options.largest, subject, options.batch, seq)
    optimizer = _optimizer(options.optimizer, subject.model)
    budget = _budget(options.budget)
    with _progress() as progress:
        predictor = OOMPredictor(
            subject.model,
            optimizer,
            hardware=hardware,
            loss=subject.loss,
            plan=None if options.plan is None else _plan(options.plan, subject.model, hardware),
            accumulate=options.accumulate,
            progress=progress,
        )
        batch = _batch(subject, options.batch, seq)
        prediction = predictor.predict(batch, budget=budget, recommend=options.recommend)
        largest = _largest(predictor, subject, options, seq, budget)
    _write(prediction, options)
    _show(prediction, largest, options)
    return 0 if prediction.fits else DOES_NOT_FIT


def _check(options: Options) -> None:
    for name, value in (("batch", options.batch), ("seq", options.seq), ("accumulate", options.accumulate)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if options.dtype is not None and options.dtype.lower() not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if options.largest not in (None, "batch", "seq"):
        raise ConfigError(f"--largest must be batch or seq, got {options.largest!r}")
    for path in (options.html, options.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{str(path)!r} must be in a folder that exists")


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    if name.lower() == "none":
        return None
    known: dict[str, Any] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key.lower() not in _NOT_OPTIMIZERS
    }
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0)
        raise ConfigError(f"--optimizer {name!r} is none; the nearest is {near[0]!r}, and there are {', '.join(known)}")
    try:
        made: torch.optim.Optimizer = known[name.lower()](_trained(model))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--optimizer {name}: {error}") from error
    return made


def _trained(model: nn.Module) -> Iterable[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _plan(text: str, model: nn.Module, hardware: Hardware) -> Plan:
    """The plan of a JSON file, or that of names such as ``checkpoint+tile``."""
    if Path(text).is_file():
        return Plan.from_json(Path(text).read_text(encoding="utf-8"))
    rules = shorthands(model, hardware)
    names = text.lower().split("+")
    if unknown := [name for name in names if name not in rules]:
        raise ConfigError(
            f"--plan {text!r}: {', '.join(map(repr, unknown))} is no file, and nothing that this model can have on "
            f"{hardware.name}; it can have {', '.join(rules) or 'nothing'}, joined by +, or the file of Plan.to_json()"
        )
    plan = planned(Plan(), {name: rules[name] for name in names}).plan
    assert plan is not None
    return plan


def _budget(text: str | None) -> Budget | None:
    """A number is a number, and everything else is for the predictor to read."""
    for number in (int, float):
        try:
            return None if text is None else number(text)
        except ValueError:
            continue
    return text


def _batch(subject: Subject, batch: int, seq: int) -> Any:
    try:
        return subject.batch(batch, seq)
    except Exception as error:
        raise ConfigError(f"the batch_fn raises {type(error).__name__} for ({batch}, {seq}): {error}") from error


def _check_axis(asked: str, subject: Subject, batch: int, seq: int) -> None:
    """Refuse to look for the largest of what the batches do not grow with, and say what they do."""
    sizes = {"batch": [(1, seq), (2, seq)], "seq": [(batch, 1), (batch, 2)]}
    parts = {axis: [parts_of(_batch(subject, *size)) for size in both] for axis, both in sizes.items()}
    axes = [axis for axis, (small, large) in parts.items() if small != large]
    if asked not in axes:
        use = f"use --largest {axes[0]}" if axes else "let its batch_fn use its arguments"
        raise ConfigError(f"--largest {asked}: the batches of this model are the same for any {asked}; {use}")


def _largest(
    predictor: OOMPredictor, subject: Subject, options: Options, seq: int, budget: Budget | None
) -> LargestBatch | BudgetError | None:
    if options.largest is None:
        return None
    by_batch = options.largest == "batch"
    try:
        return predictor.largest(
            lambda n: _batch(subject, n, seq) if by_batch else _batch(subject, options.batch, n),
            budget=budget,
            at_most=_MOST if by_batch else subject.longest or _MOST,
        )
    except BudgetError as error:
        return error
    except ConfigError as error:
        # What the predictor says of it is about arguments that a command line does not have.
        cause = error.__cause__ if isinstance(error.__cause__, MemscaleError) else error
        raise ConfigError(
            f"--largest {options.largest}: {cause}; if that is beyond what the data or the model has, use "
            "OOMPredictor.largest(at_most=...) in Python"
        ) from error


def _write(prediction: OOMPrediction, options: Options) -> None:
    for path, write in ((options.html, prediction.profile.html), (options.plot, prediction.profile.plot)):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def _show(prediction: OOMPrediction, largest: LargestBatch | BudgetError | None, options: Options) -> None:
    if options.as_json:
        data = json.loads(prediction.to_json())
        if options.largest is not None:
            data["largest"] = dataclasses.asdict(largest) if isinstance(largest, LargestBatch) else None
        print(json.dumps(data))
        return
    screen = Console(soft_wrap=True, highlight=False, markup=False)
    screen.print(str(prediction))
    if largest is not None:
        screen.print(f"largest {options.largest}: {largest}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr, which counts simulations; it pulses while their number is not known."""
    screen = Console(stderr=True)
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,  # a log gets nothing, not even the empty line that a bar leaves there
    )
    with bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
