"""``memscale predict``: whether a training step fits on a card, from the model's config alone."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from memscale.algebra import Plan, Transform, compose
from memscale.cli.subject import DTYPES, Subject, read_subject
from memscale.core import BudgetError, ConfigError, MemscaleError
from memscale.hardware import Hardware, has_rate
from memscale.planning import Budget, LargestBatch, OOMPrediction, OOMPredictor, SizeGrid, parts_of, planned, shorthands
from memscale.simulation import as_hardware
from memscale.transforms import cast

DOES_NOT_FIT = 3
INTERRUPTED = 130

_MOST = 2**20
_ROWS, _COLUMNS, _DEFAULT_LONGEST = 6, 6, 8192  # of a table: powers of two from the batch up, from the longest down
_QUIET_SECONDS = 2.0
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
    at_most: int | None
    recommend: bool | None
    as_json: bool
    html: Path | None
    plot: Path | None
    csv: Path | None


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
    _write(prediction, largest, options)
    _show(prediction, largest, options)
    if isinstance(largest, LargestBatch) and largest.interrupted:
        return INTERRUPTED
    return 0 if prediction.fits else DOES_NOT_FIT


def _check(options: Options) -> None:
    numbers = {"batch": options.batch, "seq": options.seq, "accumulate": options.accumulate, "at-most": options.at_most}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if options.dtype is not None and options.dtype.lower() not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if options.largest not in (None, "batch", "seq", "grid"):
        raise ConfigError(f"--largest must be batch, seq or grid, got {options.largest!r}")
    if options.at_most is not None and options.largest is None:
        raise ConfigError("--at-most is the largest size to look at; say of what, with --largest batch, seq or grid")
    if options.csv is not None and options.largest != "grid":
        raise ConfigError("--csv is for the table of --largest grid; the numbers of a step come with --json")
    for path in (options.html, options.plot, options.csv):
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
    # A dtype for cast is a wish, also where the card has no unit for the usual one.
    asked = [name.partition(":") for name in text.lower().split("+")]
    rules = dict(shorthands(model, hardware))
    anywhere = shorthands(model, dataclasses.replace(hardware, flops_per_second={}))
    if "cast" in anywhere:
        rules["cast"] = anywhere["cast"]
    names = [name for name, _, _ in asked]
    if wrong := [name + sep + dtype for name, sep, dtype in asked if sep and (name != "cast" or dtype not in DTYPES)]:
        raise ConfigError(
            f"--plan {text!r}: {', '.join(map(repr, wrong))} is none; cast takes a dtype, as in cast:fp16"
        )
    if unknown := [name for name in names if name not in rules]:
        raise ConfigError(
            f"--plan {text!r}: {', '.join(map(repr, unknown))} is no file, and nothing that this model can have on "
            f"{hardware.name}; it can have {', '.join(rules) or 'nothing'}, joined by +, or the file of Plan.to_json()"
        )
    plan = planned({name: rules[name] for name in names})
    narrow = "bf16" if not hardware.flops_per_second or has_rate("bfloat16", hardware) else "fp16"
    compute = DTYPES[next((dtype for name, _, dtype in asked if name == "cast" and dtype), narrow)]
    return Plan([(rule.pattern, _computing_in(compute, rule.transform)) for rule in plan])


def _computing_in(dtype: torch.dtype, transform: Transform) -> Transform:
    """`transform` with every `cast` in it computing in `dtype`."""
    if transform == cast():
        return cast(compute=dtype)
    parts = getattr(transform, "transforms", ())
    return compose(*(_computing_in(dtype, part) for part in parts)) if parts else transform


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
    wanted = list(sizes) if asked == "grid" else [asked]
    parts = {axis: [parts_of(_batch(subject, *size)) for size in both] for axis, both in sizes.items()}
    axes = [axis for axis, (small, large) in parts.items() if small != large]
    if missing := [axis for axis in wanted if axis not in axes]:
        use = f"use --largest {axes[0]}" if axes else "let its batch_fn use its arguments"
        raise ConfigError(
            f"--largest {asked}: the batches of this model are the same for any {' and '.join(missing)}; {use}"
        )


def _largest(
    predictor: OOMPredictor, subject: Subject, options: Options, seq: int, budget: Budget | None
) -> LargestBatch | SizeGrid | BudgetError | None:
    if options.largest is None:
        return None
    if options.largest == "grid":
        longest = min(options.at_most or max(seq, _DEFAULT_LONGEST), subject.longest or _MOST)
        return predictor.grid(
            lambda rows, tokens: _batch(subject, rows, tokens),
            batches=[options.batch << power for power in range(_ROWS)],
            lengths=sorted(max(1, longest >> power) for power in range(min(_COLUMNS, longest.bit_length()))),
            budget=budget,
        )
    by_batch = options.largest == "batch"
    try:
        return predictor.largest(
            lambda n: _batch(subject, n, seq) if by_batch else _batch(subject, options.batch, n),
            budget=budget,
            at_most=min(options.at_most or _MOST, _MOST if by_batch else subject.longest or _MOST),
        )
    except BudgetError as error:
        return error
    except ConfigError as error:
        # What the predictor says of it is about arguments that a command line does not have.
        cause = error.__cause__ if isinstance(error.__cause__, MemscaleError) else error
        raise ConfigError(
            f"--largest {options.largest}: {cause}; if that is beyond what the data or the model has, use --at-most"
        ) from error


def _write(prediction: OOMPrediction, largest: LargestBatch | SizeGrid | BudgetError | None, options: Options) -> None:
    writers: list[tuple[Path | None, Callable[[Path], Any]]] = [(options.html, prediction.profile.html)]
    if isinstance(largest, SizeGrid):
        text = largest.to_csv()
        writers += [(options.plot, largest.plot), (options.csv, lambda path: path.write_text(text, encoding="utf-8"))]
    else:
        writers.append((options.plot, prediction.profile.plot))
    for path, write in writers:
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def _show(prediction: OOMPrediction, largest: LargestBatch | SizeGrid | BudgetError | None, options: Options) -> None:
    if options.as_json:
        data = json.loads(prediction.to_json())
        if options.largest is not None:
            data["largest"] = _as_data(largest)
        print(json.dumps(data))
        return
    screen = Console(soft_wrap=True, highlight=False, markup=False)
    screen.print(str(prediction))
    if largest is not None:
        screen.print(str(largest) if isinstance(largest, SizeGrid) else f"largest {options.largest}: {largest}")


def _as_data(largest: LargestBatch | SizeGrid | BudgetError | None) -> Any:
    if isinstance(largest, SizeGrid):
        return [
            {
                "batch": rows,
                "seq": tokens,
                "fits": largest.fits(rows, tokens),
                "peak_bytes": largest.peaks.get((rows, tokens)),
            }
            for rows in largest.batches
            for tokens in largest.lengths
        ]
    return dataclasses.asdict(largest) if isinstance(largest, LargestBatch) else None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr, which counts simulations; it pulses while their number is not known.

    Without a terminal there is a line now and then, and none from what is done at once.
    """
    screen = Console(stderr=True)
    if not screen.is_terminal:
        began = said = time.monotonic()

        def say(what: str, done: int, total: int | None) -> None:
            nonlocal said
            if time.monotonic() - said >= _QUIET_SECONDS:
                said = time.monotonic()
                count = f"{done}/{total}" if total else f"{done}"
                print(f"simulating: {count} done in {said - began:.0f} s, now {what}", file=sys.stderr, flush=True)

        yield say
        return
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=screen,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
