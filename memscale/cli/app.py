"""The commands and how their errors reach the user: one line each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memscale.cli.demo import demo
from memscale.cli.explain import ExplainOptions, explain_snapshot
from memscale.cli.groups import HISTORY, TELEMETRY
from memscale.cli.options import (
    SIZES,
    Accumulate,
    Allow,
    Batch,
    Dtype,
    Forbid,
    Gpu,
    Hf,
    Host,
    Json,
    Mode,
    Optimizer,
    Parallel,
    Plan,
    Python,
    Seq,
    Shard,
    Tensor,
    World,
    whole_number,
)
from memscale.cli.plan import AllowOptions, PlanOptions, frontier, plan
from memscale.cli.predict import Options, predict
from memscale.cli.step import StepOptions
from memscale.cli.tune import TuneOptions, tune
from memscale.core import MemscaleError
from memscale.telemetry import COMMANDS, count

# The base of typer's usage errors. It is click's class in older versions and typer's own copy in newer ones,
# so no import names it in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)
app.add_typer(HISTORY, name="history")
app.add_typer(TELEMETRY, name="telemetry")


@app.callback()
def memscale() -> None:
    """Train in less memory, to the same numbers."""


@app.command("demo")
def demo_command(
    steps: Annotated[
        int,
        typer.Option(parser=whole_number, metavar="N", help="Optimizer steps for each of the two models."),
    ] = 8,
    layers: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Transformer blocks.")] = 8,
    width: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Hidden size, a multiple of 64.")] = 256,
    batch: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Rows of text in a step.")] = 8,
    seq: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Bytes of text in a row, at most 1024.")
    ] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes CUDA if it can.")] = "auto",
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a step may take, such as 300MiB; by default 2/5 of what it does take."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes, a .png.")] = Path("memscale-demo.png"),
) -> int:
    """Plan a small GPT-2 for a budget of memory, train it on this Python's own source with and without, and compare."""
    return demo(steps=steps, layers=layers, width=width, batch=batch, seq=seq, device=device, budget=budget, out=out)


@app.command("predict")
def predict_command(
    hf: Hf,
    batch: Batch = 1,
    seq: Seq = None,
    optimizer: Optimizer = "adamw",
    gpu: Gpu = None,
    dtype: Dtype = None,
    plan: Plan = None,
    accumulate: Accumulate = 1,
    parallel: Parallel = None,
    world: World = None,
    shard: Shard = None,
    tensor: Tensor = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the step may take: 6GiB, 6GB, bytes, or a share: 0.9 or 90%."),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(metavar="batch|seq|grid", help="Find also the largest batch or sequence that fits, or a table."),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="The largest size that --largest looks at.")
    ] = None,
    recommend: Annotated[
        bool | None,
        typer.Option("--recommend/--no-recommend", help="Simulate what would free memory; by default if it is close."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Where a report of the step goes, a .html.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where a picture of the step, or of the table, goes: a .png or .svg.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Where the table of --largest grid goes, a .csv.")] = None,
) -> int:
    """Tell whether a training step fits on a card, without the card and without running it.

    Exits with 0 if it fits, 3 if it does not, 2 if an option is wrong.
    """
    return predict(
        Options(
            step=StepOptions(
                hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()), tensor
            ),
            plan=plan,
            budget=budget,
            largest=largest,
            at_most=at_most,
            recommend=recommend,
            as_json=as_json,
            html=html,
            plot=plot,
            csv=csv,
        )
    )


@app.command("plan")
def plan_command(
    hf: Hf,
    budget: Annotated[str, typer.Option(metavar="SIZE", help=f"What the step may take: {SIZES}.")],
    batch: Batch = 1,
    seq: Seq = None,
    optimizer: Optimizer = "adamw",
    gpu: Gpu = None,
    dtype: Dtype = None,
    accumulate: Accumulate = 1,
    parallel: Parallel = None,
    world: World = None,
    shard: Shard = None,
    tensor: Tensor = None,
    mode: Mode = None,
    allow: Allow = None,
    forbid: Forbid = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Let a policy choose the techniques that are tried first.")
    ] = False,
    host: Host = None,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a picture of the planned step goes, a .png or .svg.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a page about the plan goes, a .html.")
    ] = None,
    python: Python = None,
) -> int:
    """Find the fastest training step that fits a budget, and say why it is that.

    Exits with 0 if there is one, 3 if nothing fits, 2 if an option is wrong.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()), tensor)
    allowed = AllowOptions(mode, allow or [], forbid or [], host, auto)
    return plan(PlanOptions(step, allowed, budget, json, plot, html, python))


@app.command("frontier")
def frontier_command(
    hf: Hf,
    batch: Batch = 1,
    seq: Seq = None,
    optimizer: Optimizer = "adamw",
    gpu: Gpu = None,
    dtype: Dtype = None,
    accumulate: Accumulate = 1,
    parallel: Parallel = None,
    world: World = None,
    shard: Shard = None,
    tensor: Tensor = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"Plan for this too, and say why: {SIZES}.")
    ] = None,
    points: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Budgets to plan for.")] = 12,
    mode: Mode = None,
    allow: Allow = None,
    forbid: Forbid = None,
    host: Host = None,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a picture of the curve goes, a .png or .svg.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the curve goes as a page that shows each plan, a .html.")
    ] = None,
    python: Python = None,
) -> int:
    """Show what memory costs in time: plans from the smallest step to the step as it is.

    Exits with 0, with 3 if nothing fits the budget, with 2 if an option is wrong.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()), tensor)
    allowed = AllowOptions(mode, allow or [], forbid or [], host)
    return frontier(PlanOptions(step, allowed, budget, json, plot, html, python), points)


@app.command("tune")
def tune_command(
    hf: Hf,
    objective: Annotated[
        str,
        typer.Option(
            metavar="throughput|batch|sequence",
            help="The batch size that gets through most in a second, the largest one, or the longest sequence.",
        ),
    ] = "throughput",
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"What a step may take: {SIZES}; by default all of the device.")
    ] = None,
    batch: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Rows of a batch, for --objective sequence.")
    ] = 1,
    seq: Seq = None,
    at_least: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="The smallest size to look at.")] = 1,
    at_most: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="The largest size to look at.")
    ] = None,
    optimizer: Optimizer = "adamw",
    gpu: Gpu = None,
    dtype: Dtype = None,
    accumulate: Accumulate = 1,
    parallel: Parallel = None,
    world: World = None,
    shard: Shard = None,
    tensor: Tensor = None,
    mode: Mode = None,
    allow: Allow = None,
    forbid: Forbid = None,
    host: Host = None,
    confirm: Annotated[
        bool,
        typer.Option("--confirm/--no-confirm", help="Run a real step at the end, if model and device are there."),
    ] = True,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a picture of the sizes goes, a .png or .svg.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a page about the plan goes, a .html.")
    ] = None,
    python: Python = None,
) -> int:
    """Find the best batch size or sequence length and the plan that it needs, without running out of memory.

    Exits with 0, with 3 if nothing fits, with 2 if an option is wrong.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()), tensor)
    allowed = AllowOptions(mode, allow or [], forbid or [], host)
    return tune(TuneOptions(step, allowed, objective, budget, at_least, at_most, confirm, json, plot, html, python))


@app.command("explain")
def explain_command(
    snapshot: Annotated[Path, typer.Argument(help="A file that torch.cuda.memory._dump_snapshot wrote.")],
    device: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="Whose memory; by default where it ran out.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where a page about it goes, a .html.")] = None,
    hf: Annotated[
        str | None,
        typer.Option(metavar="CONFIG|MODULE:FACTORY", help="The model, to find the plan that would have fit."),
    ] = None,
    batch: Batch = 1,
    seq: Seq = None,
    optimizer: Optimizer = "adamw",
    gpu: Gpu = None,
    dtype: Dtype = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help=f"What its step may take: {SIZES}.")] = None,
) -> int:
    """Explain a crash: what held the memory when it ran out, and which plan would have fitted.

    The file is read as plain data; one that names anything is refused. Exits with 0, with 2 if an option is wrong.
    """
    step = None if hf is None else StepOptions(hf, batch, seq, optimizer, gpu, dtype, 1)
    return explain_snapshot(ExplainOptions(snapshot, device, step, budget, html))


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments`` and return the exit status."""
    if arguments and arguments[0] in COMMANDS:
        count(f"command:{arguments[0]}")
    try:
        return int(app(arguments or ["--help"], prog_name="memscale", standalone_mode=False) or 0)
    except MemscaleError as error:
        message = str(error)
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        print("memscale: stopped", file=sys.stderr)
        return 130
    print(f"memscale: {message}", file=sys.stderr)
    return 2
