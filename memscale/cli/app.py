"""The commands."""

from __future__ import annotations

from typing import Annotated

import typer

import memscale as ms
from memscale.cli.demo import DemoOptions, demo
from memscale.cli.explain import ExplainOptions, explain_snapshot
from memscale.cli.history import HISTORY
from memscale.cli.options import add
from memscale.cli.plan import FrontierOptions, PlanOptions, frontier, plan
from memscale.cli.predict import Options, predict
from memscale.cli.pull import pull
from memscale.cli.running import run_app
from memscale.cli.server import SERVER
from memscale.cli.telemetry import TELEMETRY
from memscale.cli.tune import TuneOptions, tune
from memscale.telemetry import COMMANDS
from memscale.telemetry import count as count_call

app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)
app.add_typer(HISTORY, name="history")
app.add_typer(TELEMETRY, name="telemetry")
app.add_typer(SERVER, name="server")
app.command("plan-pull", hidden=True)(pull)


def _version(asked: bool) -> None:
    if asked:
        print(f"memscale {ms.__version__}")
        raise typer.Exit


@app.callback()
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

add(app, "demo", DemoOptions, demo, _DEMO)
add(app, "predict", Options, predict, _PREDICT)
add(app, "plan", PlanOptions, plan, _PLAN)
add(app, "frontier", FrontierOptions, frontier, _FRONTIER)
add(app, "tune", TuneOptions, tune, _TUNE)
add(app, "explain", ExplainOptions, explain_snapshot, _EXPLAIN)


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments`` and return the exit status."""
    if arguments and arguments[0] in COMMANDS:
        count_call(f"command:{arguments[0]}")
    if arguments[:2] == ["plan", "pull"]:  # `plan` has no other word that is not an option
        arguments = ["plan-pull", *arguments[2:]]
    return run_app(app, arguments)
