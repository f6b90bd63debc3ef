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


def _version(asked: bool) -> None:
    if asked:
        print(f"memscale {ms.__version__}")
        raise typer.Exit


def memscale(
    version: Annotated[bool, typer.Option("--version", help="The version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Train in less memory, to the same numbers."""


_DEMO = "Plan a small GPT-2 for a memory budget, train it with and without the plan, and compare memory and numbers."
_PREDICT = """Predict whether a training step fits on a card, without the card and without running the step.

Exits with 0 if it fits, 3 if it does not, 2 if an option is wrong."""
_PLAN = """Find the plan of the fastest training step that fits a budget, and explain the choice.

`memscale plan pull plan:HASH` reads a plan from a team's server instead. Exits with 0 if a plan is found, 3 if nothing
fits, 2 if an option is wrong."""
_FRONTIER = """Show the time of a step for each memory budget: plans from the smallest step to the step without one.

Exits with 0, with 3 if nothing fits the budget, with 2 if an option is wrong."""
_TUNE = """Find the best batch size or sequence length and the plan that it needs, without running out of memory.

Exits with 0, with 3 if nothing fits, with 2 if an option is wrong."""
_EXPLAIN = """Explain a crash: what held the memory when it ran out, and which plan would have fitted.

The file is read as plain data; no code in it can run. Exits with 0, with 2 if an option is wrong."""

_CARDS = "List the cards that --gpu and hardware= accept by name, with the memory that CUDA reports and their speeds."
_HISTORY = "Show earlier predictions ($MEMSCALE_HISTORY), and check whether a step takes more memory now."
_TELEMETRY = "Counts of calls: off by default, and sent only by `send`. Without a command: show the present setting."
_SERVER = "Run history for a team: accounts, projects, pages and an API (needs the extra 'server')."

# Each command by its name: its file, the names of its options and its function there, and its help text.
_COMMANDS = {
    "demo": ("demo", "DemoOptions", "demo", _DEMO),
    "predict": ("predict", "PredictOptions", "predict", _PREDICT),
    "plan": ("plan", "PlanOptions", "plan", _PLAN),
    "frontier": ("plan", "FrontierOptions", "frontier", _FRONTIER),
    "tune": ("tune", "TuneOptions", "tune", _TUNE),
    "cards": ("cards", "CardsOptions", "cards", _CARDS),
    "explain": ("explain", "ExplainOptions", "explain_snapshot", _EXPLAIN),
}
_GROUPS = {"history": ("HISTORY", _HISTORY), "telemetry": ("TELEMETRY", _TELEMETRY), "server": ("SERVER", _SERVER)}
_UNCOUNTED = ("telemetry", "server")


def command_line(selected: str) -> typer.Typer:
    """Returns the command line in which only the command `selected` is complete; others have a name and a help text.

    A complete command imports its file, so this keeps the start of the program fast.
    """
    app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)
    app.callback()(memscale)
    for name, (home, options, run, text) in _COMMANDS.items():
        if name == selected:
            module = importlib.import_module(f"memscale.cli.{home}")
            add(app, name, getattr(module, options), getattr(module, run), text)
        else:
            app.command(name, help=text)(_other)
    for name, (group, text) in _GROUPS.items():
        if name == selected:
            app.add_typer(getattr(importlib.import_module(f"memscale.cli.{name}"), group), name=name, help=text)
        else:
            app.command(name, help=text)(_other)
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
