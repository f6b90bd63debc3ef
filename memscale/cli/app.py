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


_DEMO = "Plan a small GPT-2 for a budget of memory, train it on this Python's own source with and without, and compare."
_PREDICT = """Tell whether a training step fits on a card, without the card and without running it.

Exits with 0 if it fits, 3 if it does not, 2 if an option is wrong."""
_PLAN = """Find the fastest training step that fits a budget, and say why it is that.

`memscale plan pull plan:HASH` reads one from a team's server instead. Exits with 0 if there is one, 3 if nothing fits,
2 if an option is wrong."""
_FRONTIER = """Show what memory costs in time: plans from the smallest step to the step as it is.

Exits with 0, with 3 if nothing fits the budget, with 2 if an option is wrong."""
_TUNE = """Find the best batch size or sequence length and the plan that it needs, without running out of memory.

Exits with 0, with 3 if nothing fits, with 2 if an option is wrong."""
_EXPLAIN = """Explain a crash: what held the memory when it ran out, and which plan would have fitted.

The file is read as plain data; one that names anything is refused. Exits with 0, with 2 if an option is wrong."""

_CARDS = "List the cards that --gpu and hardware= know by name, with the memory that CUDA reports and their speeds."
_HISTORY = "What was predicted before ($MEMSCALE_HISTORY), and whether a step takes more now."
_TELEMETRY = "Counts of calls: off by default, and sent by nothing but `send`. Alone it shows what holds."
_SERVER = "Run history for a team: accounts, projects, pages and an API (needs the extra 'server')."

# Each command by its name: its file, its options and its function there, and what it does.
_COMMANDS = {
    "demo": ("demo", "DemoOptions", "demo", _DEMO),
    "predict": ("predict", "Options", "predict", _PREDICT),
    "plan": ("plan", "PlanOptions", "plan", _PLAN),
    "frontier": ("plan", "FrontierOptions", "frontier", _FRONTIER),
    "tune": ("tune", "TuneOptions", "tune", _TUNE),
    "cards": ("cards", "CardsOptions", "cards", _CARDS),
    "explain": ("explain", "ExplainOptions", "explain_snapshot", _EXPLAIN),
}
_GROUPS = {"history": ("HISTORY", _HISTORY), "telemetry": ("TELEMETRY", _TELEMETRY), "server": ("SERVER", _SERVER)}
_UNCOUNTED = ("telemetry", "server")


def command_line(asked: str) -> typer.Typer:
    """The command line with one command whole, which loads what it needs; the others have a name and a help text."""
    app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)
    app.callback()(memscale)
    for name, (home, options, run, text) in _COMMANDS.items():
        if name == asked:
            module = importlib.import_module(f"memscale.cli.{home}")
            add(app, name, getattr(module, options), getattr(module, run), text)
        else:
            app.command(name, help=text)(_other)
    for name, (group, text) in _GROUPS.items():
        if name == asked:
            app.add_typer(getattr(importlib.import_module(f"memscale.cli.{name}"), group), name=name, help=text)
        else:
            app.command(name, help=text)(_other)
    if asked == "plan-pull":
        app.command("plan-pull", hidden=True)(importlib.import_module("memscale.cli.pull").pull)
    return app


def _other() -> int:
    """A command that was not asked for, and so is never run."""
    raise NotImplementedError


def load(arguments: list[str]) -> Callable[[], int]:
    """Load what the command line ``arguments`` needs, and return what runs it."""
    asked = next((word for word in arguments if not word.startswith("-")), "")
    command = asked
    if arguments[:2] == ["plan", "pull"]:  # `plan` has no other word that is not an option
        command, arguments = "plan-pull", ["plan-pull", *arguments[2:]]
    app = command_line(command)
    if asked in {*_COMMANDS, *_GROUPS} - {*_UNCOUNTED}:
        from memscale.telemetry import count

        count(f"command:{asked}")
    return functools.partial(run_app, app, arguments)


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments`` and return the exit status."""
    return load(arguments)()
