"""The commands and how their errors reach the user: one line each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memscale.cli.demo import demo
from memscale.cli.predict import Options, predict
from memscale.core import MemscaleError

# The base of typer's usage errors. It is click's class in older versions and typer's own copy in newer ones,
# so no import names it in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="memscale", add_completion=False, rich_markup_mode=None)


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
    out: Annotated[Path, typer.Option(help="Where the picture goes, a .png.")] = Path("memscale-demo.png"),
) -> int:
    """Train a small GPT-2 on this Python's own source, as it is and checkpointed, and compare."""
    return demo(steps=steps, layers=layers, width=width, batch=batch, seq=seq, device=device, out=out)


@app.command("predict")
def predict_command(
    hf: Annotated[
        str,
        typer.Option(
            metavar="CONFIG|MODULE:FACTORY",
            help="A transformers config.json, or a function that returns a model, (model, batch_fn) or "
            "(model, batch_fn, loss); batch_fn(batch, seq) makes a batch.",
        ),
    ],
    batch: Annotated[int, typer.Option(parser=_whole_number, metavar="N", help="Rows of a batch.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(parser=_whole_number, metavar="N", help="Tokens of a row; by default 1024 or all positions."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="An optimizer of torch.optim, or none.")] = "adamw",
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A card such as h100, or cpu; by default the device at hand.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; by default fp32 for a config, and as it is for a factory.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="checkpoint, offload, tile and cast (cast:fp16) joined by +, or the file of a Plan in JSON."),
    ] = None,
    accumulate: Annotated[
        int, typer.Option(parser=_whole_number, metavar="N", help="Batches for each optimizer step.")
    ] = 1,
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
            hf=hf,
            batch=batch,
            seq=seq,
            optimizer=optimizer,
            gpu=gpu,
            dtype=dtype,
            plan=plan,
            accumulate=accumulate,
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


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments`` and return the exit status."""
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
