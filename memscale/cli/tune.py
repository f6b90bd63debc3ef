"""``memscale tune``: the best batch size or sequence length, and the plan that it needs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

from typer import Option

import memscale as ms
from memscale.cli.options import SIZES, Json, Python, Seconds, count, file
from memscale.cli.plan import AllowOptions, nothing_fits
from memscale.cli.predict import check_axis
from memscale.cli.price import PriceOptions, cost_of, line_of
from memscale.cli.script import as_script
from memscale.cli.step import RankOptions, batch_of, read_step
from memscale.cli.terminal import INTERRUPTED, Content, check_files, show, simulations, write
from memscale.core import BudgetError, ConfigError, budget_bytes

_AXES = {"throughput": "batch", "batch": "batch", "sequence": "seq"}
_MOST = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The command line of ``memscale tune``, as typed."""

    step: RankOptions
    using: AllowOptions
    prices: PriceOptions
    objective: Annotated[
        str,
        Option(
            metavar="throughput|batch|sequence",
            help="The batch size that gets through most in a second, the largest one, or the longest sequence, of "
            "--batch rows.",
        ),
    ] = "throughput"
    budget: Annotated[
        str | None, Option(metavar="SIZE", help=f"What a step may take: {SIZES}; by default 95 % of the device.")
    ] = None
    at_least: Annotated[int, count("N", "The smallest size to look at.")] = 1
    at_most: Annotated[int | None, count("N", "The largest size to look at.")] = None
    confirm: Annotated[
        bool, Option("--confirm/--no-confirm", help="Run a real step at the end, if model and device are there.")
    ] = True
    seconds: Seconds = 30.0
    json: Json = None
    plot: Annotated[Path | None, file("Where a picture of the sizes goes, a .png or .svg.")] = None
    html: Annotated[Path | None, file("Where a page about the plan goes, a .html.")] = None
    python: Python = None

    @property
    def files(self) -> dict[str, Path | None]:
        """By the option that asks for them."""
        return {name: getattr(self, name) for name in ("json", "plot", "html", "python")}


def tune(options: TuneOptions) -> int:
    """Tune, print the sizes, write the files; return 0, 3 if nothing fits, or 130 if it was stopped with a result.

    Raises:
        ConfigError: an option is wrong, or a step cannot be simulated.
        RuntimeUnavailable: a package is not there.
    """
    from memscale.planning import LEFT_FREE

    options.step.check()
    options.prices.check()
    _check(options)
    check_files(options.files)
    config = options.using.config()
    # A real step is recorded by Kineto, which logs to stderr, through the bar; see `demo`.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    step = read_step(options.step)
    subject = step.subject
    budget = options.budget
    if budget is not None:
        budget_bytes(budget, step.hardware.usable_bytes)
    axis = _AXES[options.objective]
    check_axis("--objective", options.objective, [axis], subject, options.step.batch, step.seq)
    longest = subject.longest or _MOST if axis == "seq" else _MOST

    def batch_fn(size: int) -> Any:
        return batch_of(subject, *((size, step.seq) if axis == "batch" else (options.step.batch, size)))

    with simulations() as progress:
        tuner = ms.AutoTuner(
            subject.model,
            step.optimizer,
            loss=subject.loss,
            config=config,
            hardware=step.hardware,
            progress=progress,
            **options.step.arguments,
        )
        try:
            found = tuner.tune(
                batch_fn,
                objective=options.objective,
                budget=budget,
                at_least=options.at_least,
                at_most=min(options.at_most or _MOST, longest),
                confirm=options.confirm,
                seconds=options.seconds,
            )
        except BudgetError as error:
            return nothing_fits(error)
        except ConfigError as error:
            raise ConfigError(error.spelled(lambda argument: f"--{argument.name.replace('_', '-')}")) from error
        contents: dict[str, Content] = {
            "json": found.to_json(),
            "plot": found.plot,
            "html": found.html,
            "python": as_script(step, options.step, found.plan, batch_fn(found.size)),
        }
        write(options.files, contents)
    seconds, size = found.plan.evidence.planned.step_seconds, {axis: found.size}
    cost = line_of(options.prices, cost_of(options.prices, options.step, step, seconds, **size))
    left_free = f"note: {LEFT_FREE:.0%} of the device stays free, as a prediction may be off; --budget 100% takes all"
    show("\n".join(filter(None, (str(found), left_free if budget is None else "", cost, step.precision))))
    return INTERRUPTED if found.interrupted else 0


def _check(options: TuneOptions) -> None:
    if options.objective not in _AXES:
        raise ConfigError(f"--objective must be one of {', '.join(_AXES)}, got {options.objective!r}")
    for name, value in (("at-least", options.at_least), ("at-most", options.at_most)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if options.at_most is not None and options.at_most < options.at_least:
        raise ConfigError(f"--at-least {options.at_least} and --at-most {options.at_most} leave no size; swap the two")
