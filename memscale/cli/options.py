"""The options that several commands share, and how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def whole_number(text: str | int) -> int:
    """A parser for options that are counts."""
    try:
        return int(text)
    except ValueError:
        # typer's own message leaves out the value.
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


Hf = Annotated[
    str,
    typer.Option(
        metavar="CONFIG|MODULE:FACTORY",
        help="A transformers config.json or its folder, or a function that returns a model, (model, batch_fn) or "
        "(model, batch_fn, loss); batch_fn(batch, seq) makes a batch.",
    ),
]
Batch = Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Rows of a batch.")]
Seq = Annotated[
    int | None,
    typer.Option(parser=whole_number, metavar="N", help="Tokens of a row; by default 1024 or all positions."),
]
Optimizer = Annotated[str, typer.Option(help="An optimizer of torch.optim, or none.")]
Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="A card such as h100, or cpu; by default the device at hand.")
]
Dtype = Annotated[
    str | None, typer.Option(help="fp32, bf16 or fp16; by default fp32 for a config, and as it is for a factory.")
]
Parallel = Annotated[
    str | None, typer.Option(metavar="fsdp2|ddp", help="The step is one process's of several; the batch is that one's.")
]
World = Annotated[
    int | None, typer.Option(parser=whole_number, metavar="N", help="How many processes, with --parallel.")
]
Shard = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Modules that fsdp2 shards, by default the repeated blocks. Repeatable."),
]
Tensor = Annotated[
    int | None,
    typer.Option(parser=whole_number, metavar="M", help="Over how many processes fsdp2's layers are split besides."),
]
Accumulate = Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Batches for each optimizer step.")]
SIZES = "6GiB, 6GB, bytes, or a share: 0.9 or 90%"
Mode = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="conservative, balanced or aggressive; by default every exact technique."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Allow checkpoint, offload, tile or cast too; cast changes numbers. Repeatable."),
]
Forbid = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Do without checkpoint, offload, tile or cast. Repeatable.")
]
Host = Annotated[str | None, typer.Option(metavar="SIZE", help="What may lie in the host's memory at most.")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Where the result goes as JSON.")]
Python = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where a script goes that builds the model and applies the plan.")
]


Plan = Annotated[
    str | None,
    typer.Option(help="checkpoint, offload, tile and cast (cast:fp16) joined by +, or the file of a Plan in JSON."),
]
