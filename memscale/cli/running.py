"""Runs a command and prints each error as one line."""

from __future__ import annotations

import errno
import os
import sys

import typer

from memscale.core import MemscaleError

# The base class of typer's usage errors: click's class in older versions and typer's own copy in newer ones, so that no
# single import works for both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO}


def run_app(app: typer.Typer, arguments: list[str]) -> int:
    """Runs the command line `arguments` of `app` and returns the exit status."""
    try:
        status = int(app(arguments or ["--help"], prog_name="memscale", standalone_mode=False) or 0)
        sys.stdout.flush()  # flushed here, so that a failed write becomes an error of the command
        return status
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if (context := getattr(error, "ctx", None)) is not None:
            message = f"{message.rstrip('.')}; {context.command_path} --help shows what it takes"
    except OSError as error:
        if error.filename is not None:
            message = f"{error.filename!r}: {error.strerror}"
        elif error.errno in _UNWRITABLE:
            message = f"the output cannot be written: {error.strerror}"
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or Python would report it again at its exit
        else:
            raise
    except (KeyboardInterrupt, typer.Abort):
        print("memscale: stopped", file=sys.stderr)
        return 130
    except MemscaleError as error:
        message = str(error)
    print(f"memscale: {message}", file=sys.stderr)
    return 2
