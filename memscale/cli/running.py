"""How a command's errors reach the user: one line each."""

from __future__ import annotations

import errno
import os
import sys

import typer

# The base of typer's usage errors. It is click's class in older versions and typer's own copy in newer ones,
# so no import names it in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO}


def run_app(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command line `arguments` of `app` and return the exit status."""
    try:
        status = int(app(arguments or ["--help"], prog_name="memscale", standalone_mode=False) or 0)
        sys.stdout.flush()  # here, and not when Python ends: what cannot be written is an error like others
        return status
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if (context := getattr(error, "ctx", None)) is not None:
            message = f"{message.rstrip('.')}; {context.command_path} --help shows what it takes"
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        message = f"the output cannot be written: {error.strerror}"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or Python would say so again when it ends
    except (KeyboardInterrupt, typer.Abort):
        print("memscale: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        from memscale.core import MemscaleError  # of who has raised it; without an error, PyTorch is not loaded for it

        if not isinstance(error, MemscaleError):
            raise
        message = str(error)
    print(f"memscale: {message}", file=sys.stderr)
    return 2
