"""The ``memscale`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 a check failed, 2 bad input, 3 nothing fits.

    >>> main(["demo", "--layers", "0"])
    2

    Args:
        arguments: what follows the program's name; None takes them from ``sys.argv``.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        from memscale.cli.app import load

        run = load(words)
    except ModuleNotFoundError as error:
        package = (error.name or "memscale").partition(".")[0]
        if package == "memscale":
            raise
        print(f"memscale: the command needs {package}: pip install 'memscale-transforms[cli]'", file=sys.stderr)
        return 2
    return run()
