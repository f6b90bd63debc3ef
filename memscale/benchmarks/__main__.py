"""The command: simulate, print, write, compare."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memscale
from memscale.benchmarks.subjects import SUBJECTS, chosen
from memscale.benchmarks.table import DETERMINISTIC, as_text, changes, row
from memscale.core import ConfigError, Document, MemscaleError
from memscale.hardware import Hardware, cpu_name

_DOCUMENT = Document("benchmarks", version=1, writer="python -m memscale.benchmarks", error=ConfigError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m memscale.benchmarks", description=__doc__)
    titles = ", ".join(each.title for each in SUBJECTS)
    parser.add_argument("--models", help=f"beginnings of titles, separated by commas; all are {titles}")
    parser.add_argument("--device", help="simulate this card, not each row's: as h100, or cuda, the one at hand")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    parser.add_argument("--compare", type=Path, help="results of before: tell what is different")
    options = parser.parse_args(arguments)
    try:
        device = Hardware.detect("cuda").name if options.device == "cuda" else options.device
        if device is not None:
            Hardware.named(device)
        subjects = chosen(options.models, device)
        before = None if options.compare is None else _DOCUMENT.read(options.compare.read_text())["rows"]
    except (ValueError, MemscaleError, OSError, KeyError) as error:
        parser.error(str(error))
    rows = [row(subject, partial(_show, done, len(subjects))) for done, subject in enumerate(subjects)]
    _show(len(subjects), len(subjects), "")
    print(as_text(rows))
    print(f"\nSimulated: {', '.join(DETERMINISTIC)} are the same on every machine. Only took_seconds is of this one.")
    if options.output is not None:
        options.output.write_text(_DOCUMENT.write({"machine": _machine(), "rows": rows}, indent=1) + "\n")
    if before is not None:
        print("\n".join(["", *(list(changes(before, rows)) or ["nothing is different"])]))
    return 0


def _show(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        bar = "#" * (20 * done // total)
        print(f"\r\033[K[{bar:20}] {done}/{total} {what}", end="" if what else "\n", file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memscale": memscale.__version__,
        "deterministic": list(DETERMINISTIC),
    }


if __name__ == "__main__":
    sys.exit(main())
