"""``memscale tune``: finds the best batch size or sequence length, and the plan that it needs."""

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
    at_least: Annotated[int, count("N", "The smallest size to try.")] = 1
    at_most: Annotated[int | None, count("N", "The largest size to try.")] = None
    confirm: Annotated[
        bool, Option("--confirm/--no-confirm", help="Run a real step at the end, if the weights and the device exist.")
    ] = True
    seconds: Seconds = 30.0
    json: Json = None
    plot: Annotated[Path | None, file("File for a picture of the sizes, a .png or .svg.")] = None
    html: Annotated[Path | None, file("File for a page about the plan, a .html.")] = None
    python: Python = None

    @property
    def files(self) -> dict[str, Path | None]:
        """The files to write, by the name of their option."""
        return {name: getattr(self, name) for name in ("json", "plot", "html", "python")}


def tune(options: TuneOptions) -> int:
    """Tunes, prints the sizes and writes the files. Returns 0, 3 if nothing fits, 130 if interrupted with a result.

    Raises:
        ConfigError: an option is wrong, or a step cannot be simulated.
        RuntimeUnavailable: a package is missing.
    """
    from memscale.planning import LEFT_FREE

    options.step.check()
    options.prices.check()
    _check(options)
    check_files(options.files)
    config = options.using.config()
    # Kineto records the real step and logs to stderr, which would break the progress bar; see `demo`.
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
