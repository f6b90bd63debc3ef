"""``memscale server``: serves the run history of a team on the team's own machine, without loading PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from memscale import server

SERVER = typer.Typer()
USER = typer.Typer(help="Accounts.")
SERVER.add_typer(USER, name="user")


@SERVER.command("run")
def run(
    listen: Annotated[str, Option(metavar="ADDRESS:PORT", help="Where to listen.")] = "127.0.0.1:8765",
    public_url: Annotated[
        str | None, Option(metavar="URL", help="The https address that people type, of the TLS proxy in front.")
    ] = None,
) -> None:
    """Serve until interrupted. The database is $DATABASE_URL, or a file in the folder $MEMSCALE_STATE."""
    server.run(listen, public_url)


@SERVER.command("migrate")
def migrate() -> None:
    """Bring the database to this version, after a backup of it; `run` does so, too."""
    server.migrate()


@SERVER.command("backup")
def backup(path: Annotated[Path, Argument(metavar="PATH", help="The file to write; it must not exist.")]) -> None:
    """Write a copy of the database; the server may be running."""
    server.backup(path)


@USER.command("invite")
def invite(
    email: Annotated[str, Argument(metavar="EMAIL")],
    team: Annotated[str | None, Option(metavar="NAME", help="Its name in addresses, if there are several.")] = None,
    role: Annotated[str, Option(metavar="ROLE", help="viewer, member, maintainer or owner.")] = "member",
) -> None:
    """Print a one-time link that makes an account, or sets a new password for one."""
    server.invite(email, team, role)
