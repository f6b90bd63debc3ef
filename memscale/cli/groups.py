"""The commands that have commands of their own: `memscale history` and `memscale telemetry`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memscale.cli import history, telemetry
from memscale.cli.options import add, whole_number
from memscale.telemetry import State

HISTORY = typer.Typer(help="What was predicted before ($MEMSCALE_HISTORY), and whether a step takes more now.")
TELEMETRY = typer.Typer()

_Name = Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this name.")]


_CHECKED = """Simulate a step and compare it with what it took before.

Exits with 0, with 3 if it takes more, with 2 if an option is wrong or there is no baseline."""
add(HISTORY, "check", history.CheckOptions, history.check, _CHECKED)


@HISTORY.command("list")
def history_list_command(
    name: _Name = None,
    last: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="So many of the newest.")] = 20,
) -> int:
    """Show the runs of the history, the newest last."""
    return history.show_list(name, last)


@HISTORY.command("show")
def history_show_command(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="How a run's id begins, or last.")],
) -> int:
    """Show one run."""
    return history.show_run(run_id)


@HISTORY.command("compare")
def history_compare_command(
    first: Annotated[str, typer.Argument(metavar="ID", help="How a run's id begins, or last.")],
    second: Annotated[str, typer.Argument(metavar="ID", help="Likewise.")] = "last",
) -> int:
    """Show what changed from one run to another, by category and module."""
    return history.compare(first, second)


@HISTORY.command("export")
def history_export_command(
    to: Annotated[
        str,
        typer.Option(metavar="KIND", help="csv, json (a line for each run), mlflow, tensorboard, trackio or wandb."),
    ] = "csv",
    name: _Name = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where csv and json go; by default to stdout.")
    ] = None,
) -> int:
    """Give the runs to other tools."""
    return history.export(to, name, out)


@TELEMETRY.callback(invoke_without_command=True)
def telemetry_command(context: typer.Context) -> int:
    """Counts of calls: off by default, and sent by nothing but `send`. Alone it shows what holds."""
    return telemetry.status() if context.invoked_subcommand is None else 0


@TELEMETRY.command("status")
def telemetry_status_command() -> int:
    """Show what holds, what decided it, and where the files are."""
    return telemetry.status()


@TELEMETRY.command("on")
def telemetry_on_command(
    endpoint: Annotated[str, typer.Option(metavar="URL", help="Where `send` posts to; none is built in.")],
) -> int:
    """Count calls from now on, and let `send` post the counts."""
    return telemetry.switch(State.ON, endpoint)


@TELEMETRY.command("local")
def telemetry_local_command() -> int:
    """Count calls on this machine from now on, and send nothing."""
    return telemetry.switch(State.LOCAL)


@TELEMETRY.command("off")
def telemetry_off_command() -> int:
    """Count nothing from now on; what was counted stays, for `clean` to remove."""
    return telemetry.switch(State.OFF)


@TELEMETRY.command("show")
def telemetry_show_command(
    week: Annotated[str | None, typer.Option(metavar="YYYY-Www", help="One week, as it is so far.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Laid out for reading.")] = False,
) -> int:
    """Print the exact bytes that `send` would send."""
    return telemetry.show(week, as_json)


@TELEMETRY.command("send")
def telemetry_send_command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
) -> int:
    """Post the weeks that are over, each once. Exits with 1 where one could not be sent, which then stays."""
    return telemetry.send(dry_run)


@TELEMETRY.command("clean")
def telemetry_clean_command() -> int:
    """Switch it off, and remove everything that was counted or sent."""
    return telemetry.clean()
