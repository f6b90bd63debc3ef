"""``memscale history``: shows earlier predictions, and checks whether a step takes more memory now."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Argument, Option

from memscale.cli.options import PrintJson, Shorthand, add, size
from memscale.cli.predict import read_plan
from memscale.cli.step_options import Step, StepOptions, batch_of, read_step
from memscale.cli.terminal import DOES_NOT_FIT, show
from memscale.config import Config
from memscale.core import ConfigError, aligned, budget_bytes, format_bytes, format_seconds
from memscale.history import (
    TEXTS,
    TRACKERS,
    Baseline,
    Comparison,
    History,
    Remote,
    Run,
    commit_of,
    document_of,
    is_address,
    queue_path,
    record,
    send,
)
from memscale.simulation import MemoryProfiler

HISTORY = typer.Typer()

_RunId = Annotated[str, Argument(metavar="ID", help="The beginning of a run's id, or last.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions(StepOptions):
    """The command line of ``memscale history check``, as typed."""

    baseline: Annotated[
        str,
        Option(
            metavar="FILE|REF|URL#LABEL",
            help="A file of runs, a git reference whose runs are in the history, or a baseline of a server's project.",
        ),
    ]
    plan: Shorthand = None
    tolerance: Annotated[str, size("The largest increase that passes", may_be_share=False, may_be_zero=True)] = "0"
    update: Annotated[bool, Option("--update", help="Replace the baseline in the file by this run.")] = False
    as_json: PrintJson = False


def check(options: CheckOptions) -> int:
    """Simulates the step, compares it with its baseline and prints the result. Returns 0, or 3 if it takes more.

    Raises:
        ConfigError: an option is wrong, there is no such baseline, or the step cannot be simulated.
        RuntimeUnavailable: a package is missing.
    """
    tolerance_bytes = 0 if options.tolerance == "0" else budget_bytes(options.tolerance, 0)
    torch.manual_seed(0)  # for models that route or drop layers at random
    step = read_step(options)
    find, make = _source(options)
    run = _simulated(step, options)
    before = find(run)
    if before is None and not options.update:
        raise ConfigError(
            f"--baseline {options.baseline!r} has no run of {run.name!r} on {run.hardware!r}; write the first with "
            "--update into a file, or set $MEMSCALE_HISTORY where the baseline's commit is checked"
        )
    if options.update:
        assert make is not None, "a commit's runs are not written"
        make(run)
    comparison = None if before is None else Comparison(before, run, tolerance_bytes)
    _tell(run, comparison, options)
    return DOES_NOT_FIT if comparison is not None and comparison.is_regression and not options.update else 0


def _source(options: CheckOptions) -> tuple[Callable[[Run], Run | None], Callable[[Run], object] | None]:
    """Returns the functions that find the baseline of a run and make the run the baseline.

    A baseline is in a file of runs, under the label of a server's project, or among the runs of a commit in the
    history; the second function of a commit is `None`.
    """
    if is_address(options.baseline):
        url, _, label = options.baseline.partition("#")
        remote = Remote(url)
        return partial(remote.baseline, label or "main"), partial(remote.set_baseline, label or "main")
    path = Path(options.baseline)
    if options.update or path.exists() or path.suffix:
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise ConfigError(f"--baseline {options.baseline!r} must be a file in a folder that exists")
        file = Baseline(path)
        return lambda run: file.run(run.name, run.hardware), file.write
    commit = commit_of(options.baseline)
    if not commit:
        raise ConfigError(
            f"--baseline {options.baseline!r} is neither a file nor a git reference here; pass one of them, or make "
            "the file with --update"
        )

    def newest(run: Run) -> Run | None:
        with History() as history:
            return next(iter(history.runs(name=run.name, hardware=run.hardware, commit=commit, last=1)), None)

    return newest, None


def _simulated(step: Step, options: CheckOptions) -> Run:
    subject = step.subject
    plan = None if options.plan is None else read_plan(options.plan, subject.model, step.hardware)
    profiler = MemoryProfiler(
        subject.model,
        plan=plan,
        **step.arguments,
        keeps_output=options.keeps_output,
        config=Config(use_empirical_fallback=False),
    )
    batch = batch_of(subject, options.batch, step.seq)
    profile = profiler.profile(batch, accumulate=options.accumulate)
    # Named by the options, not by the resulting plan: a check must notice that the same options give another plan.
    name = f"{options.hf} batch={options.batch} seq={step.seq} accumulate={options.accumulate} "
    name += f"optimizer={options.optimizer}" + " keeps_output" * options.keeps_output
    name += "".join(f" {key}={value}" for key in ("dtype", "plan") if (value := getattr(options, key)) is not None)
    about: dict[str, Any] = {"plan": plan, "model": subject.model, "batch": batch}
    return record(profile, name, **about) or Run.of(profile, name, **about)


def _tell(run: Run, comparison: Comparison | None, options: CheckOptions) -> None:
    if options.as_json:
        data: dict[str, Any] = {"verdict": "new", "run": run.summary()}
        if comparison is not None:
            data = {
                "verdict": comparison.verdict,
                "changed_bytes": comparison.changed_bytes,
                "by_category": comparison.diff.by_category,
                "by_module": comparison.diff.by_module,
                "before": comparison.before.summary(),
                "run": run.summary(),
            }
        print(json.dumps(data))
        return
    show(
        f"new: {run.name} on {run.hardware}: {format_bytes(run.profile.taken_bytes)}"
        if comparison is None
        else str(comparison)
    )
    if options.update:
        show(f"{options.baseline} has this run now")


_CHECKED = """Simulate a step and compare its memory with the baseline.

Exits with 0, with 3 if it takes more, with 2 if an option is wrong or there is no baseline."""
add(HISTORY, "check", CheckOptions, check, _CHECKED)


@HISTORY.command("list")
def show_list(last: Annotated[int, Option(min=1, metavar="N", help="The number of newest runs to show.")] = 20) -> None:
    """Show the runs of the history, the newest last."""
    with History() as history:
        runs = history.runs(last=last)
    rows = [("id", "made", "commit", "hardware", "peak", "step", "name"), *map(_row, runs)]
    print("\n".join(aligned(rows, "<" * len(rows[0]))))


def _row(run: Run) -> tuple[str, ...]:
    seconds = run.profile.step_seconds
    return (
        *(run.id, run.made, run.commit[:12] + "+" * run.commit.endswith("+"), run.hardware),
        *(format_bytes(run.profile.taken_bytes), "" if seconds is None else format_seconds(seconds), run.name),
    )


@HISTORY.command("show")
def show_run(run_id: _RunId) -> None:
    """Show one run."""
    with History() as history:
        run = history.run(run_id)
    for name, value in run.summary().items():
        show(f"{name:20}  {value}")
    show(str(run.profile))


@HISTORY.command("compare")
def compare(first: _RunId, second: Annotated[str, Argument(metavar="ID", help="Likewise.")] = "last") -> None:
    """Show what changed from one run to another, by category and module."""
    with History() as history:
        show(str(Comparison(history.run(first), history.run(second))))


@HISTORY.command("push")
def push(
    to: Annotated[
        str | None, Option(metavar="URL", help="The project's page; by default what waits for any server is sent.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the JSON that would be sent, and send nothing.")] = False,
) -> int:
    """Send runs to a team's server, each once. The token is $MEMSCALE_TOKEN, or in a file of mode 0600."""
    url = None if to is None else Remote(to).url
    with History(queue_path()) as history:
        if dry_run:
            runs = [run for run, *_ in history.waiting()] if url is None else history.unsent(url)
            for run in runs:
                print(json.dumps(document_of(run)))
            return 0
        if url is not None:
            history.queue(url)
        counts, refused = {"new": 0, "was there": 0}, []
        for run, said in send(history):  # runs without an acknowledgement stay queued for the next push
            if said in counts:
                counts[said] += 1
            else:
                refused.append(f"{run.id} {run.name!r}: {said}")
    print(f"{counts['new']} sent, {counts['was there']} were there")
    for line in refused:
        print(f"memscale: {line}", file=sys.stderr)
    return 1 if refused else 0


@HISTORY.command("export")
def export(
    to: Annotated[
        str, Option(metavar="KIND", help="csv, json (a line for each run), mlflow, tensorboard, trackio or wandb.")
    ] = "csv",
) -> None:
    """Give the runs to other tools; csv and json go to stdout."""
    if to not in TEXTS and to not in TRACKERS:
        raise ConfigError(f"--to must be one of {', '.join([*TEXTS, *TRACKERS])}, got {to!r}")
    with History() as history:
        runs = history.runs()
    if to in TRACKERS:
        TRACKERS[to](runs)
    else:
        print(TEXTS[to](runs), end="")
