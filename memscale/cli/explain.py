"""``memscale explain``: what held the memory when a run ran out of it, and which plan would have fitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memscale.cli.step import StepOptions, batch_of, read_step, typed_budget
from memscale.cli.terminal import check_files, write
from memscale.core import ConfigError
from memscale.crashes import explain


@dataclass(frozen=True)
class ExplainOptions:
    """The command line of ``memscale explain``, as typed; `step` is None where no model is given."""

    snapshot: Path
    device: int | None
    step: StepOptions | None
    budget: str | None
    html: Path | None


def explain_snapshot(options: ExplainOptions) -> int:
    """Explain, print, write the page; return 0.

    Raises:
        ConfigError: an option is wrong, or the file is no snapshot.
        RuntimeUnavailable: a package is not there, or the step can be neither simulated nor run here.
    """
    files = {"html": options.html}
    check_files(files)
    if options.step is None:
        if options.budget is not None:
            raise ConfigError("--budget is for the plan of a model; give that with --hf")
        found = explain(options.snapshot, device=options.device)
    else:
        options.step.check()
        step = read_step(options.step)
        found = explain(
            options.snapshot,
            device=options.device,
            model=step.subject.model,
            batch=batch_of(step.subject, options.step.batch, step.seq),
            optimizer=step.optimizer,
            loss=step.subject.loss,
            hardware=step.hardware,
            budget=None if options.budget is None else typed_budget(options.budget),
        )
    write(files, {"html": found.html})
    print(found)
    return 0
