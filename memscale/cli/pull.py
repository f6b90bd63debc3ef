"""``memscale plan pull``: reads a plan from a team's server by its hash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from memscale.cli.options import file
from memscale.core import ConfigError
from memscale.history import Remote


def pull(
    name: Annotated[str, Argument(metavar="plan:HASH", help="The plan's hash, eight digits of it or more.")],
    source: Annotated[
        str | None, Option("--from", metavar="URL", help="The team's page; by default $MEMSCALE_SERVER.")
    ] = None,
    out: Annotated[Path | None, file("Where the plan goes as JSON; by default to stdout.")] = None,
) -> None:
    """Read a plan from a team's server, check its hash, and print it as JSON."""
    url = source or os.environ.get("MEMSCALE_SERVER")
    if not url:
        raise ConfigError(
            "no server is given; pass --from with the address of the team's page, or set $MEMSCALE_SERVER"
        )
    text = Remote(url).plan(name).to_json()
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
