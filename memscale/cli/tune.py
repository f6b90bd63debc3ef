"""``memscale tune``: finds the best batch size or sequence length, and the plan that it needs."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any

from typer import Option

import memscale as ms
from memscale.cli.options import Python, choice, number, size
from memscale.cli.plan import SearchOptions
from memscale.cli.predict import check_axis
from memscale.cli.price import cost_of, line_of
from memscale.cli.script import as_script
from memscale.cli.step_options import read_step
from memscale.cli.terminal import INTERRUPTED, Content, show, simulations, write
from memscale.core import ConfigError

_AXES = {"throughput": "batch", "batch": "batch", "sequence": "seq"}
_MOST = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(SearchOptions):
    """The command line of ``memscale tune``, as typed."""

    objective: Annotated[
        str,
        choice(
            "The batch size that gets through most in a second, the largest one, or the longest sequence, of "
            "--batch rows.",
            *_AXES,
            metavar="throughput|batch|sequence",
        ),
    ] = "throughput"
    budget: Annotated[str | None, size("What a step may take, by default 95 % of the device")] = None
    at_least: Annotated[int, number("The smallest size to try.", least=1)] = 1
    at_most: Annotated[int | None, number("The largest size to try.", least=1)] = None
    python: Python = None
    confirm: Annotated[
        bool, Option("--confirm/--no-confirm", help="Run a real step at the end, if the weights and the device exist.")
    ] = True

    def check(self) -> None:
        if self.at_most is not None and self.at_most < self.at_least:
            raise ConfigError(f"--at-least {self.at_least} and --at-most {self.at_most} leave no size; swap the two")


def tune(options: TuneOptions) -> int:
    """Tunes, prints the sizes and writes the files. Returns 0, 3 if nothing fits, 130 if interrupted with a result.

    Raises:
        ConfigError: an option is wrong, or a step cannot be simulated.
        RuntimeUnavailable: a package is missing.
    """
    from memscale.planning import LEFT_FREE

    config = options.config()
    # Kineto records the real step and logs to stderr, which would break the progress bar; see `demo`.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    step = read_step(options)
    subject = step.subject
    budget = options.budget
    axis = _AXES[options.objective]
    check_axis("--objective", options.objective, [axis], subject, options.batch, step.seq)
    longest = subject.longest or _MOST if axis == "seq" else _MOST
    if options.at_least > longest:
        raise ConfigError(f"--at-least {options.at_least} is more than {longest}, the most that is tried; lower it")

    def batch_fn(size: int) -> Any:
        return subject.batch(*((size, step.seq) if axis == "batch" else (options.batch, size)))

    with simulations() as progress:
        tuner = ms.AutoTuner(
            subject.model,
            config=config,
            stepping=options.stepping or (),
            progress=progress,
            **step.arguments,
            **options.arguments,
        )
        found = tuner.tune(
            batch_fn,
            objective=options.objective,
            budget=budget,
            at_least=options.at_least,
            at_most=min(options.at_most or _MOST, longest),
            confirm=options.confirm,
            seconds=options.seconds,
        )
        contents: dict[str, Content] = {
            "json": found.to_json(),
            "plot": found.plot,
            "html": found.html,
            "python": as_script(step, options, found.plan, batch_fn(found.size)),
        }
        write(options, contents)
    seconds, size = found.plan.evidence.planned.step_seconds, {axis: found.size}
    cost = line_of(options, cost_of(options, step, seconds, **size))
    left_free = f"note: {LEFT_FREE:.0%} of the device stays free, as a prediction may be off; --budget 100% takes all"
    show("\n".join(filter(None, (str(found), left_free if budget is None else "", cost, step.precision))))
    return INTERRUPTED if found.interrupted else 0
