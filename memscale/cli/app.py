"""The commands and how their errors reach the user: one line each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memscale.cli import history, telemetry
from memscale.cli.demo import demo
from memscale.cli.explain import ExplainOptions, explain_snapshot
from memscale.cli.plan import AllowOptions, PlanOptions, frontier, plan
from memscale.cli.predict import Options, predict
from memscale.cli.step import StepOptions
from memscale.cli.tune import TuneOptions, tune
from memscale.core import MemscaleError
from memscale.telemetry import COMMANDS, State, count

# The base of typer's usage errors. It is click's class in older versions and typer's own copy in newer ones,
# so no import names it in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)
_history = typer.Typer(help="What was predicted before ($MEMSCALE_HISTORY), and whether a step takes more now.")
app.add_typer(_history, name="history")
_telemetry = typer.Typer(help="Counts of calls: off by default, and sent by nothing but `send`.")
app.add_typer(_telemetry, name="telemetry")


def _whole_number(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        # typer's own message leaves out the value.
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


@app.callback()
def memscale() -> None:
    """Train in less memory, to the same numbers."""


@app.command("demo")
def demo_command(
    steps: Annotated[
        int,
        typer.Option(parser=_whole_number, metavar="N", help="Optimizer steps for each of the two models."),
    ] = 8,
    layers: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Transformer blocks.")] = 8,
    width: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Hidden size, a multiple of 64.")] = 256,
    batch: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Rows of text in a step.")] = 8,
    seq: Annotated[
        int, typer.Option(parser=_whole_number, metavar="N", help="Bytes of text in a row, at most 1024.")
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


_Hf = Annotated[
    str,
    typer.Option(
        metavar="CONFIG|MODULE:FACTORY",
        help="A transformers config.json or its folder, or a function that returns a model, (model, batch_fn) or "
        "(model, batch_fn, loss); batch_fn(batch, seq) makes a batch.",
    ),
]
_Batch = Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Rows of a batch.")]
_Seq = Annotated[
    int | None,
    typer.Option(parser=_whole_number, metavar="N", help="Tokens of a row; by default 1024 or all positions."),
]
_Optimizer = Annotated[str, typer.Option(help="An optimizer of torch.optim, or none.")]
_Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="A card such as h100, or cpu; by default the device at hand.")
]
_Dtype = Annotated[
    str | None, typer.Option(help="fp32, bf16 or fp16; by default fp32 for a config, and as it is for a factory.")
]
_Parallel = Annotated[
    str | None, typer.Option(metavar="fsdp2|ddp", help="The step is one process's of several; the batch is that one's.")
]
_World = Annotated[
    int | None, typer.Option(parser=_whole_number, metavar="N", help="How many processes, with --parallel.")
]
_Shard = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Modules that fsdp2 shards, by default the repeated blocks. Repeatable."),
]
_Accumulate = Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Batches for each optimizer step.")]
_SIZES = "6GiB, 6GB, bytes, or a share: 0.9 or 90%"
_Mode = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="conservative, balanced or aggressive; by default every exact technique."),
]
_Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Allow checkpoint, offload, tile or cast too; cast changes numbers. Repeatable."),
]
_Forbid = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Do without checkpoint, offload, tile or cast. Repeatable.")
]
_Host = Annotated[str | None, typer.Option(metavar="SIZE", help="What may lie in the host's memory at most.")]
_Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Where the result goes as JSON.")]
_Python = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where a script goes that builds the model and applies the plan.")
]


_Plan = Annotated[
    str | None,
    typer.Option(help="checkpoint, offload, tile and cast (cast:fp16) joined by +, or the file of a Plan in JSON."),
]


@app.command("predict")
def predict_command(
    hf: _Hf,
    batch: _Batch = 1,
    seq: _Seq = None,
    optimizer: _Optimizer = "adamw",
    gpu: _Gpu = None,
    dtype: _Dtype = None,
    plan: _Plan = None,
    accumulate: _Accumulate = 1,
    parallel: _Parallel = None,
    world: _World = None,
    shard: _Shard = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the step may take: 6GiB, 6GB, bytes, or a share: 0.9 or 90%."),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(metavar="batch|seq|grid", help="Find also the largest batch or sequence that fits, or a table."),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(parser=_whole_number, metavar="N", help="The largest size that --largest looks at.")
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
            step=StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ())),
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
    hf: _Hf,
    budget: Annotated[str, typer.Option(metavar="SIZE", help=f"What the step may take: {_SIZES}.")],
    batch: _Batch = 1,
    seq: _Seq = None,
    optimizer: _Optimizer = "adamw",
    gpu: _Gpu = None,
    dtype: _Dtype = None,
    accumulate: _Accumulate = 1,
    parallel: _Parallel = None,
    world: _World = None,
    shard: _Shard = None,
    mode: _Mode = None,
    allow: _Allow = None,
    forbid: _Forbid = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Let a policy choose the techniques that are tried first.")
    ] = False,
    host: _Host = None,
    json: _Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a picture of the planned step goes, a .png or .svg.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a page about the plan goes, a .html.")
    ] = None,
    python: _Python = None,
) -> int:
    """Find the fastest training step that fits a budget, and say why it is that.

    Exits with 0 if there is one, 3 if nothing fits, 2 if an option is wrong.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()))
    allowed = AllowOptions(mode, allow or [], forbid or [], host, auto)
    return plan(PlanOptions(step, allowed, budget, json, plot, html, python))


@app.command("frontier")
def frontier_command(
    hf: _Hf,
    batch: _Batch = 1,
    seq: _Seq = None,
    optimizer: _Optimizer = "adamw",
    gpu: _Gpu = None,
    dtype: _Dtype = None,
    accumulate: _Accumulate = 1,
    parallel: _Parallel = None,
    world: _World = None,
    shard: _Shard = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"Plan for this too, and say why: {_SIZES}.")
    ] = None,
    points: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Budgets to plan for.")] = 12,
    mode: _Mode = None,
    allow: _Allow = None,
    forbid: _Forbid = None,
    host: _Host = None,
    json: _Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a picture of the curve goes, a .png or .svg.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the curve goes as a page that shows each plan, a .html.")
    ] = None,
    python: _Python = None,
) -> int:
    """Show what memory costs in time: plans from the smallest step to the step as it is.

    Exits with 0, with 3 if nothing fits the budget, with 2 if an option is wrong.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()))
    allowed = AllowOptions(mode, allow or [], forbid or [], host)
    return frontier(PlanOptions(step, allowed, budget, json, plot, html, python), points)


@app.command("tune")
def tune_command(
    hf: _Hf,
    objective: Annotated[
        str,
        typer.Option(
            metavar="throughput|batch|sequence",
            help="The batch size that gets through most in a second, the largest one, or the longest sequence.",
        ),
    ] = "throughput",
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"What a step may take: {_SIZES}; by default all of the device.")
    ] = None,
    batch: Annotated[
        int, typer.Option(parser=_whole_number, metavar="N", help="Rows of a batch, for --objective sequence.")
    ] = 1,
    seq: _Seq = None,
    at_least: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="The smallest size to look at.")] = 1,
    at_most: Annotated[
        int | None, typer.Option(parser=_whole_number, metavar="N", help="The largest size to look at.")
    ] = None,
    optimizer: _Optimizer = "adamw",
    gpu: _Gpu = None,
    dtype: _Dtype = None,
    accumulate: _Accumulate = 1,
    parallel: _Parallel = None,
    world: _World = None,
    shard: _Shard = None,
    mode: _Mode = None,
    allow: _Allow = None,
    forbid: _Forbid = None,
    host: _Host = None,
    confirm: Annotated[
        bool,
        typer.Option("--confirm/--no-confirm", help="Run a real step at the end, if model and device are there."),
    ] = True,
    json: _Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a picture of the sizes goes, a .png or .svg.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where a page about the plan goes, a .html.")
    ] = None,
    python: _Python = None,
) -> int:
    """Find the best batch size or sequence length and the plan that it needs, without running out of memory.

    Exits with 0, with 3 if nothing fits, with 2 if an option is wrong.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate, parallel, world, tuple(shard or ()))
    allowed = AllowOptions(mode, allow or [], forbid or [], host)
    return tune(TuneOptions(step, allowed, objective, budget, at_least, at_most, confirm, json, plot, html, python))


_Name = Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this name.")]


@_history.command("check")
def history_check_command(
    hf: _Hf,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="FILE|REF", help="A file of runs, or a git reference whose runs are in the history, such as main."
        ),
    ],
    batch: _Batch = 1,
    seq: _Seq = None,
    optimizer: _Optimizer = "adamw",
    gpu: _Gpu = None,
    dtype: _Dtype = None,
    plan: _Plan = None,
    accumulate: _Accumulate = 1,
    tolerance: Annotated[str, typer.Option(metavar="SIZE", help="How much more is no regression, such as 1MiB.")] = "0",
    update: Annotated[
        bool, typer.Option("--update", help="Write this run into the file, in the old one's place.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Simulate a step and compare it with what it took before.

    Exits with 0, with 3 if it takes more, with 2 if an option is wrong or there is no baseline.
    """
    step = StepOptions(hf, batch, seq, optimizer, gpu, dtype, accumulate)
    return history.check(history.CheckOptions(step, plan, baseline, tolerance, update, as_json))


@_history.command("list")
def history_list_command(
    name: _Name = None,
    last: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="So many of the newest.")] = 20,
) -> int:
    """Show the runs of the history, the newest last."""
    return history.show_list(name, last)


@_history.command("show")
def history_show_command(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="How a run's id begins, or last.")],
) -> int:
    """Show one run."""
    return history.show_run(run_id)


@_history.command("compare")
def history_compare_command(
    first: Annotated[str, typer.Argument(metavar="ID", help="How a run's id begins, or last.")],
    second: Annotated[str, typer.Argument(metavar="ID", help="Likewise.")] = "last",
) -> int:
    """Show what changed from one run to another, by category and module."""
    return history.compare(first, second)


@_history.command("export")
def history_export_command(
    to: Annotated[str, typer.Option(metavar="KIND", help="csv, json, mlflow, tensorboard, trackio or wandb.")] = "csv",
    name: _Name = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where csv and json go; by default to stdout.")
    ] = None,
) -> int:
    """Give the runs to other tools."""
    return history.export(to, name, out)


@app.command("explain")
def explain_command(
    snapshot: Annotated[Path, typer.Argument(help="A file that torch.cuda.memory._dump_snapshot wrote.")],
    device: Annotated[
        int | None, typer.Option(parser=_whole_number, metavar="N", help="Whose memory; by default where it ran out.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where a page about it goes, a .html.")] = None,
    hf: Annotated[
        str | None,
        typer.Option(metavar="CONFIG|MODULE:FACTORY", help="The model, to find the plan that would have fit."),
    ] = None,
    batch: _Batch = 1,
    seq: _Seq = None,
    optimizer: _Optimizer = "adamw",
    gpu: _Gpu = None,
    dtype: _Dtype = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help=f"What its step may take: {_SIZES}.")] = None,
) -> int:
    """Explain a crash: what held the memory when it ran out, and which plan would have fitted.

    The file is read as plain data; one that names anything is refused. Exits with 0, with 2 if an option is wrong.
    """
    step = None if hf is None else StepOptions(hf, batch, seq, optimizer, gpu, dtype, 1)
    return explain_snapshot(ExplainOptions(snapshot, device, step, budget, html))


@_telemetry.command("status")
def telemetry_status_command() -> int:
    """Show what holds, what decided it, and where the files are."""
    return telemetry.status()


@_telemetry.command("on")
def telemetry_on_command(
    endpoint: Annotated[str, typer.Option(metavar="URL", help="Where `send` posts to; none is built in.")],
) -> int:
    """Count calls from now on, and let `send` post the counts."""
    return telemetry.switch(State.ON, endpoint)


@_telemetry.command("local")
def telemetry_local_command() -> int:
    """Count calls on this machine from now on, and send nothing."""
    return telemetry.switch(State.LOCAL)


@_telemetry.command("off")
def telemetry_off_command() -> int:
    """Count nothing from now on; what was counted stays, for `clean` to remove."""
    return telemetry.switch(State.OFF)


@_telemetry.command("show")
def telemetry_show_command(
    week: Annotated[str | None, typer.Option(metavar="YYYY-Www", help="One week, as it is so far.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Laid out for reading.")] = False,
) -> int:
    """Print the exact bytes that `send` would send."""
    return telemetry.show(week, as_json)


@_telemetry.command("send")
def telemetry_send_command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
) -> int:
    """Post the weeks that are over, each once. Exits with 1 where one could not be sent, which then stays."""
    return telemetry.send(dry_run)


@_telemetry.command("clean")
def telemetry_clean_command() -> int:
    """Switch it off, and remove everything that was counted or sent."""
    return telemetry.clean()


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
