"""``memscale explain``: shows what held the memory when a run ran out of it, and a plan that would have fitted."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import memscale as ms
from memscale.cli.options import Html, size
from memscale.cli.step_options import StepOptions, TrainingOptions, batch_of, read_step
from memscale.cli.terminal import show, write
from memscale.core import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(TrainingOptions):
    """The command line of ``memscale explain``, as typed."""

    snapshot: Annotated[Path, Argument(help="A file of torch.cuda.memory._dump_snapshot, or a log with the error.")]
    html: Html = None
    hf: Annotated[
        str | None, Option(metavar="CONFIG|MODULE:FACTORY", help="The model, to find the plan that would have fit.")
    ] = None
    budget: Annotated[str | None, size("Memory for its step")] = None

    def check(self) -> None:
        if self.hf is None and self.budget is not None:
            raise ConfigError("--budget is for the plan of a model; give that with --hf")

    @property
    def step(self) -> StepOptions | None:
        """Returns the options of the step, or `None` without a model."""
        values = {each.name: getattr(self, each.name) for each in fields(TrainingOptions)}
        return None if self.hf is None else StepOptions(hf=self.hf, **values)


def explain(options: ExplainOptions) -> None:
    """Explains the snapshot, prints the report and writes the page.

    Raises:
        ConfigError: an option is wrong, or the file is neither a snapshot nor a log with the error.
        RuntimeUnavailable: a package is missing, or the step can be neither simulated nor run on this machine.
    """
    step_options = options.step
    if step_options is None:
        found = ms.explain(options.snapshot)
    else:
        step = read_step(step_options)
        found = ms.explain(
            options.snapshot,
            model=step.subject.model,
            batch=batch_of(step.subject, step_options.batch, step.seq),
            budget=options.budget,
            **step.arguments,
        )
    write(options, {"html": found.html})
    show(str(found))
    if step_options is None:
        show(f"next: memscale explain {shlex.quote(str(options.snapshot))} --hf CONFIG --batch N --gpu NAME")
        show("  simulates the step of your model and finds what would have fitted")
