"""``memscale predict``: predicts from a model's config whether a training step fits on a card."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torch import nn
from typer import Option

import memscale as ms
from memscale.cli.options import Html, Plot, PrintJson, Seconds, Shorthand, as_option, choice, number, size, typed
from memscale.cli.price import PriceOptions, cost_of, line_of
from memscale.cli.step_options import RankOptions, batch_of, read_step
from memscale.cli.subject import Subject
from memscale.cli.terminal import DOES_NOT_FIT, INTERRUPTED, Content, show, simulations, write
from memscale.core import Argument, BudgetError, ConfigError

if TYPE_CHECKING:
    from memscale.hardware import Hardware
    from memscale.planning import OOMPrediction, OOMPredictor, Recommendation

_MOST = 2**20
_LARGEST = ("batch", "seq", "grid")
# The table of --largest grid: batches are powers of two from --batch up, sequences powers of two from the longest down.
_ROWS, _COLUMNS, _DEFAULT_LONGEST = 6, 6, 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions(PriceOptions):
    """The command line of ``memscale predict``, as typed."""

    plan: Shorthand = None
    budget: Annotated[str | None, size("Memory for the step")] = None
    largest: Annotated[
        str | None,
        choice("Also find the largest batch or sequence that fits, or a table.", *_LARGEST, metavar="batch|seq|grid"),
    ] = None
    at_most: Annotated[int | None, number("The largest size that --largest tries.", least=1)] = None
    recommend: Annotated[
        bool | None,
        Option("--recommend/--no-recommend", help="Simulate ways to free memory; by default if memory is short."),
    ] = None
    seconds: Seconds = 30.0
    fits: Annotated[
        bool, Option("--fits", help="Only the verdict, in a line and by the exit status: 0 fits, 3 does not.")
    ] = False
    as_json: PrintJson = False
    html: Html = None
    plot: Plot = None

    def check(self) -> None:
        others = {"--json": self.as_json, "--largest": self.largest, "--html": self.html, "--plot": self.plot}
        if self.fits and (given := next((name for name, value in others.items() if value), None)):
            raise ConfigError(f"--fits prints the verdict and nothing else; leave out {given}, or --fits")
        if self.at_most is not None and self.largest is None:
            raise ConfigError("--at-most is the largest size to try; add --largest batch, seq or grid")


def predict(options: PredictOptions) -> int:
    """Predicts, prints the result and writes the files. Returns 0 if the step fits, 3 if it does not.

    Raises:
        ConfigError: an option is wrong.
        RuntimeUnavailable: a package is missing, or the step can be neither simulated nor run on this machine.
    """
    step = read_step(options)
    subject, seq = step.subject, step.seq
    if options.largest is not None:
        wanted = ["batch", "seq"] if options.largest == "grid" else [options.largest]
        check_axis("--largest", options.largest, wanted, subject, options.batch, seq)
    budget = options.budget
    with simulations() as bar:
        predictor = ms.OOMPredictor(
            subject.model,
            plan=None if options.plan is None else read_plan(options.plan, subject.model, step.hardware),
            progress=lambda what, done, total: bar(what, done, total),  # the one that is on the screen then
            **step.arguments,
            **options.arguments,
        )
        batch = batch_of(subject, options.batch, seq)
        prediction = predictor.predict(batch, budget=budget, recommend=False)
    cost = cost_of(options, step, prediction.profile.step_seconds)
    if options.fits:
        print(f"{prediction.risk}: {prediction.message}")
        return 0 if prediction.fits else DOES_NOT_FIT
    if not options.as_json:
        cost_line = line_of(options, cost)
        show("\n".join(filter(None, (prediction.verdict(), step.line(options.batch), cost_line, step.precision))))
    with simulations() as bar:
        if prediction.risk > ms.OOMRisk.LOW if options.recommend is None else options.recommend:
            prediction = predictor.recommended(prediction, batch, seconds=options.seconds)
        sizes = None if options.largest is None else _largest(predictor, subject, options, options.largest, seq)
    profile = prediction.profile
    drawn = profile.plot if sizes is None or sizes.plot is None else sizes.plot
    write(options, {"html": profile.html, "plot": drawn})
    if options.as_json:
        data = json.loads(prediction.to_json())
        data |= {} if sizes is None else {"largest": sizes.data}
        data |= {} if cost is None else {"cost": dataclasses.asdict(cost)}
        print(json.dumps(data))
    else:
        if advice := prediction.advice(_option):
            show(advice)
        if not prediction.fits and (then := _next(prediction, options)):
            show(f"next: {then}")
        if sizes is not None:
            show(sizes.text)
    if sizes is not None and sizes.interrupted:
        return INTERRUPTED
    return 0 if prediction.fits else DOES_NOT_FIT


def read_plan(text: str, model: nn.Module, hardware: Hardware) -> ms.Plan:
    """Returns the plan in a JSON file, or the plan of shorthands such as ``checkpoint+tile``."""
    from memscale.planning import planned, shorthands

    if Path(text).is_file():
        return ms.Plan.load(text)
    names, rules = text.lower().split("+"), shorthands(model, hardware)
    if unknown := [name for name in names if name not in rules]:
        raise ConfigError(
            f"--plan {text!r}: {', '.join(map(repr, unknown))} is no file, and no transform of this model on "
            f"{hardware.name}; it can have {', '.join(rules) or 'nothing'}, joined by +, or the file of Plan.to_json()"
        )
    return planned({name: rules[name] for name in names})


def check_axis(option: str, given: str, wanted: list[str], subject: Subject, batch: int, seq: int) -> None:
    """Raises an error if the search is over an axis along which the subject's batches do not grow."""
    from memscale.planning import parts_of

    sizes = {"batch": [(1, seq), (2, seq)], "seq": [(batch, 1), (batch, 2)]}
    parts = {axis: [parts_of(batch_of(subject, *size)) for size in both] for axis, both in sizes.items()}
    axes = [axis for axis, (small, large) in parts.items() if small != large]
    if missing := [axis for axis in wanted if axis not in axes]:
        other = {"--objective": "sequence" if axes == ["seq"] else "batch"}.get(option, axes[0] if axes else "")
        remedy = f"use {option} {other}" if axes else "let its batch_fn use its arguments"
        raise ConfigError(
            f"{option} {given}: the batches of this model are the same for any {' and '.join(missing)}; {remedy}"
        )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The answer to ``--largest``: as text, as JSON data, and as a picture."""

    text: str
    data: Any
    plot: Content | None = None
    interrupted: bool = False


def _largest(predictor: OOMPredictor, subject: Subject, options: PredictOptions, axis: str, seq: int) -> _Sizes:
    rows = options.batch
    longest = subject.longest or _MOST
    if axis == "grid":
        longest = min(options.at_most or max(seq, _DEFAULT_LONGEST), longest)
        grid = predictor.grid(
            subject.batch,
            batches=[rows << power for power in range(_ROWS)],
            lengths=sorted(max(1, longest >> power) for power in range(min(_COLUMNS, longest.bit_length()))),
            budget=options.budget,
        )
        cells = [(batch, length) for batch in grid.batches for length in grid.lengths]
        data = [
            {"batch": cell[0], "seq": cell[1], "fits": grid.fits(*cell), "peak_bytes": grid.peaks.get(cell)}
            for cell in cells
        ]
        return _Sizes(str(grid), data, grid.plot)
    try:
        found = predictor.largest(
            lambda n: subject.batch(n, seq) if axis == "batch" else subject.batch(rows, n),
            budget=options.budget,
            at_most=min(options.at_most or _MOST, _MOST if axis == "batch" else longest),
        )
    except BudgetError as error:
        return _Sizes(f"largest {axis}: {error}", None)
    return _Sizes(f"largest {axis}: {found}", dataclasses.asdict(found), interrupted=found.interrupted)


def _next(prediction: OOMPrediction, options: PredictOptions) -> str:
    """Returns the command to type next for a plan or batch that fits; empty if nothing fits.

    Prefers exact numbers, then the whole batch in one pass, then the shortest time.
    """
    from memscale.planning import LEFT_FREE

    most = prediction.capacity_bytes * (1 if options.budget is not None else 1 - LEFT_FREE)

    def order(each: Recommendation) -> tuple[bool, bool, int, float]:
        exact = _numbers(each.plan) == {"exact"}
        return each.peak_bytes > most, not exact, each.parts, each.step_seconds or math.inf

    fitting = [each for each in prediction.recommendations if each.peak_bytes <= prediction.capacity_bytes]
    best = min(fitting, key=order, default=None)
    if best is None:
        return ""
    share = f"{1 - LEFT_FREE:.0%}" if best.peak_bytes <= most else "100%"
    budget = share if options.budget is None else options.budget
    step, loop = options, next(iter(best.optimizer_options), "")
    if best.parts > 1:
        step = dataclasses.replace(step, batch=step.batch // best.parts, accumulate=step.accumulate * best.parts)
    if loop and best.optimizer_options[loop]:
        step = dataclasses.replace(step, optimizer=f"{step.optimizer}-{loop}")
    words = [typed(step, RankOptions), *map(_option, best.arguments)]
    if not best.plan:
        words += [f"--budget {budget}"] if options.budget is not None else []
        words += [f"--plan {shlex.quote(options.plan)}"] if options.plan is not None else []
        return f"memscale predict {' '.join(words)}"
    words += [f"--budget {budget}", *(["--allow cast"] if "lossy" in _numbers(best.plan) else [])]
    return f"memscale plan {' '.join(words)}"


def _option(argument: Argument) -> str:
    return as_option(argument, ("allow", "optimizer", "shard", "stepping"))  # of ``memscale plan``


def _numbers(plan: ms.Plan | None) -> set[str]:
    return {"exact", *(rule.transform.numbers for rule in plan or ())}
