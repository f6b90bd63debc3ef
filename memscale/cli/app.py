"""The commands."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Annotated

import typer

import memscale as ms
from memscale.cli.options import add
from memscale.cli.running import run_app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"memscale {ms.__version__}")
        raise typer.Exit


def memscale(
    version: Annotated[bool, typer.Option("--version", help="The version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Train PyTorch models in less memory, with the same numbers."""


# The help text of each command; its first sentence is at most 65 columns, so that `memscale --help` shows it whole. The
# command `name` has its function `name` and its `NameOptions` in the file `name`; the group `name` has its app `NAME`.
_COMMANDS = {
    "demo": """Train a small GPT-2 with and without a plan, and compare.

Plans for a memory budget, and compares the memory and the numbers of both trainings.""",
    "predict": """Predict whether a training step fits on a card.

Needs neither the card nor a run of the step. Exits with 0 if the step fits, 3 if not, 2 if an option is wrong.""",
    "plan": """Find the fastest training step that fits a budget.

Prints the plan and the reasons. `memscale plan pull plan:HASH` reads a plan from a team's server instead. Exits with 0
if a plan is found, 3 if nothing fits, 2 if an option is wrong.""",
    "frontier": """Show the time of a step for each memory budget.

Plans from the smallest step to the step without a plan. Exits with 0, with 2 if an option is wrong.""",
    "tune": """Find the best batch size or sequence length, and its plan.

The search simulates steps and never runs out of memory. Exits with 0, with 3 if nothing fits, with 2 if an option is
wrong.""",
    "cards": "List the cards that --gpu accepts, with memory and speeds.",
    "explain": """Explain a crash: what held the memory, and what would fit.

The file is read as plain data; no code in it can run. Exits with 0, with 2 if an option is wrong.""",
}
_GROUPS = {
    "history": """Show earlier predictions; check whether a step takes more now.

The history is the file $MEMSCALE_HISTORY.""",
    "telemetry": """Counts of calls: off by default, and sent only by `send`.

Without a command: show the present setting.""",
    "server": "Run history for a team: pages and an API (extra 'server').",
}
_FILES = {"frontier": "plan"}  # the commands in a file of another name
_UNCOUNTED = ("telemetry", "server")


def command_line(selected: str) -> typer.Typer:
    """Returns the command line in which only the command `selected` is complete; others have a name and a help text.

    A complete command imports its file, so this keeps the start of the program fast.
    """
    app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)
    app.callback()(memscale)
    for name, text in (_COMMANDS | _GROUPS).items():
        if name != selected:
            app.command(name, help=text)(_other)
            continue
        module = importlib.import_module(f"memscale.cli.{_FILES.get(name, name)}")
        if name in _GROUPS:
            app.add_typer(getattr(module, name.upper()), name=name, help=text)
        else:
            add(app, name, getattr(module, f"{name.title()}Options"), getattr(module, name), text)
    if selected == "plan-pull":
        app.command("plan-pull", hidden=True)(importlib.import_module("memscale.cli.pull").pull)
    return app


def _other() -> int:
    """Stands for the other commands, which never run."""
    raise NotImplementedError


def load(arguments: list[str]) -> Callable[[], int]:
    """Imports what the command line `arguments` needs, and returns the function that runs it."""
    name = next((word for word in arguments if not word.startswith("-")), "")
    command = name
    if arguments[:2] == ["plan", "pull"]:  # `plan` itself takes options only
        command, arguments = "plan-pull", ["plan-pull", *arguments[2:]]
    app = command_line(command)
    if name in {*_COMMANDS, *_GROUPS} - {*_UNCOUNTED}:
        from memscale.telemetry import count

        count(f"command:{name}")
    return functools.partial(run_app, app, arguments)


def run(arguments: list[str]) -> int:
    """Runs the command line `arguments` and returns the exit status."""
    return load(arguments)()
