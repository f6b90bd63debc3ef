"""``memscale plan`` and ``memscale frontier``: a plan for one budget, and the step time for many budgets."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from typer import Option

import memscale as ms
from memscale.cli.options import ALLOWED, Html, Json, Options, Plot, Python, Seconds, choice, number, size
from memscale.cli.price import PriceOptions, axis_of, cost_of, line_of
from memscale.cli.script import as_script
from memscale.cli.step_options import Step, batch_of, read_step
from memscale.cli.terminal import INTERRUPTED, Content, show, simulations, write
from memscale.core import ConfigError, budget_bytes, format_bytes, format_seconds, format_unlike

# Of a Config and of the planner, which are not imported for a wrong option.
_MODES = ("conservative", "balanced", "aggressive")
_STEPPING = ("step_in_groups", "step_in_backward", "offload_states", "quantize_states")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllowOptions(Options):
    """The options about the techniques of a plan, as typed."""

    mode: Annotated[
        str | None,
        choice("conservative, balanced or aggressive; by default what changes no bit.", *_MODES, metavar="MODE"),
    ] = None
    allow: Annotated[
        list[str] | None,
        choice(
            "Allow checkpoint, offload, tile or cast too; cast changes numbers. Repeatable.", *ALLOWED, metavar="NAME"
        ),
    ] = None
    allow_rounding: Annotated[
        bool, Option("--allow-rounding", help="Allow tile: less memory, with sums in another order.")
    ] = False
    forbid: Annotated[
        list[str] | None, choice("Forbid checkpoint, offload, tile or cast. Repeatable.", *ALLOWED, metavar="NAME")
    ] = None
    host: Annotated[str | None, size("The most host memory that a plan may use", may_be_share=False)] = None

    def check(self) -> None:
        if both := {*(self.allow or ())} & {*(self.forbid or ())}:
            raise ConfigError(f"--allow {min(both)} and --forbid {min(both)} contradict each other")

    def config(self, *, auto: bool = False) -> ms.Config:
        """Returns the config of these options; without a mode it allows every transform that changes no bit."""
        allowed = {**dict.fromkeys(self.forbid or (), False), **dict.fromkeys(self.allow or (), True)}
        switches: dict[str, Any] = {ALLOWED[name]: allow for name, allow in allowed.items()}
        if self.allow_rounding or self.mode is None:  # a mode sets this itself
            switches.setdefault("enable_tiling", self.allow_rounding)
        if self.host is not None:
            switches["max_cpu_offload_gb"] = budget_bytes(self.host, 0) / 1e9
        return ms.Config(mode=self.mode or "aggressive", auto_policy=auto, **switches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions(AllowOptions, PriceOptions):
    """The options of the commands that search for plans, as typed."""

    json: Json = None
    plot: Plot = None
    html: Html = None
    seconds: Seconds = 30.0
    stepping: Annotated[
        list[str] | None,
        choice(
            "Let a plan change how the optimizer steps: step_in_groups, step_in_backward, offload_states, or "
            "quantize_states, which changes numbers. Repeatable.",
            *_STEPPING,
            metavar="NAME",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(SearchOptions):
    """The command line of ``memscale plan``, as typed."""

    budget: Annotated[str, size("Memory for the step")]
    python: Python = None
    auto: Annotated[bool, Option("--auto", help="Let a policy choose the techniques that are tried first.")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontierOptions(SearchOptions):
    """The command line of ``memscale frontier``, as typed."""

    points: Annotated[int, number("Budgets to plan for.", least=2)] = 12


def plan(options: PlanOptions) -> int:
    """Plans, prints the reasons and writes the files. Returns 0, 3 if nothing fits, 130 if interrupted with a plan.

    Raises:
        ConfigError: an option is wrong, or the step cannot be simulated.
        RuntimeUnavailable: a package is missing.
    """
    from memscale.planning import INTERRUPTED_SEARCH, Point

    with _engine(options, options.config(auto=options.auto), options.budget) as (engine, step):
        found = engine.plan(options.budget, seconds=options.seconds)
        as_it_is = engine.plan(2 * engine.plain.taken_bytes)  # more than enough, with the margin that a plan keeps

        contents: dict[str, Content] = {
            "json": found.to_json(),
            "plot": lambda path: engine.steps.profile(found).plot(path, budget_bytes=found.evidence.budget_bytes),
            "html": ms.Frontier.of(map(Point.of, (found, as_it_is))).html,
            "python": as_script(step, options, found, engine.step.batch),
        }
        write(options, contents)
    cost = line_of(options, cost_of(options, step, found.evidence.planned.step_seconds))
    show("\n".join([found.explain(), *filter(None, [cost, step.precision]), "", str(found)]))
    if found and options.python is None:
        show("\nnext: --python fit.py writes a script that trains under this plan")
    return INTERRUPTED if INTERRUPTED_SEARCH in found.evidence.notes else 0


def frontier(options: FrontierOptions) -> int:
    """Plans for many budgets, prints the curve and writes the files. Returns 0, or 130 if interrupted with a curve.

    Raises:
        ConfigError, RuntimeUnavailable: as `plan`.
    """
    from memscale.planning import INTERRUPTED_SEARCH, SO_FAR

    with _engine(options, options.config()) as (engine, step):
        curve = engine.frontier(options.points, seconds=options.seconds)
        ends = {"smallest": curve[0].step_seconds, "fastest": curve[-1].step_seconds}
        costs = {name: cost_of(options, step, seconds) for name, seconds in ends.items()}
        axis = axis_of(options, costs["fastest"], ends["fastest"])
        contents: dict[str, Content] = {
            "json": curve.to_json(),
            "plot": lambda path: curve.plot(path, **axis),
            "html": lambda path: curve.html(path, **axis),
        }
        write(options, contents)
    stopped = [note for note in curve[0].plan.evidence.notes if SO_FAR in note]
    priced = [f"{name}, {cost}" for name, cost in costs.items() if cost is not None]
    show("\n".join([str(curve), *priced, *(f"note: {note}" for note in stopped)]))
    return INTERRUPTED if INTERRUPTED_SEARCH in stopped else 0


@contextmanager
def _engine(
    options: SearchOptions, config: ms.Config, budget: str | None = None
) -> Iterator[tuple[ms.DecisionEngine, Step]]:
    """Returns the engine for the step of these options, with its progress on stderr.

    With a budget, prints before the search whether the plain step exceeds it.
    """
    step = read_step(options)
    batch = batch_of(step.subject, options.batch, step.seq)
    with simulations() as bar:
        engine = ms.DecisionEngine(
            step.subject.model,
            batch,
            config=config,
            stepping=options.stepping or (),
            progress=lambda what, done, total: bar(what, done, total),  # the one that is on the screen then
            **step.arguments,
            **options.arguments,
        )
    limit = math.inf if budget is None else budget_bytes(budget, step.hardware.usable_bytes)
    if engine.plain.taken_bytes > limit:
        takes, limit_text = format_unlike(engine.plain.taken_bytes, int(limit))
        seconds = engine.plain.step_seconds
        time_too = "" if seconds is None else f"{format_seconds(seconds)} and "
        above = format_bytes(engine.plain.taken_bytes - int(limit))
        show(f"as written: {time_too}{takes}, {above} above the budget of {limit_text}")
    with simulations() as bar:
        began = time.monotonic()
        try:
            yield engine, step
        finally:
            took = format_seconds(time.monotonic() - began)
            print(f"memscale: planned in {took}; steps simulated: {engine.simulations}", file=sys.stderr)
