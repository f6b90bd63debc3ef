"""`make compat`: the suite in environments of other releases of Python, PyTorch and transformers, made on the spot.

    make compat                                    every row
    make compat ARGS="--only 2.12 --keep"          the rows of one PyTorch; environments stay, for a closer look
    make compat ARGS="--only newest --python 3.13" one row of it
    make compat ARGS="--workers 1"                 as many processes of tests at a time; else one a core
    make compat ARGS="--only 2.14 -- tests/laws"   some tests only, which the table then says

Each row gets an environment in `.compat/`, with the CUDA build that the index has (6 to 8 GB on disk, deleted after the
run), and its line of the table in docs/compatibility.md, with the date. Rows that are not run keep their line.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
FOLDER = ROOT / ".compat"


class Row(NamedTuple):
    """Releases that users have together; "" is the newest that the index offers."""

    python: str
    torch: str
    transformers: str


# Every two of Python's, PyTorch's and transformers' oldest and newest meet; those between meet some of each.
ROWS = (
    Row("3.10", "2.10", "4.50"),
    Row("3.10", "2.12", "4.50"),
    Row("3.13", "2.13", ""),
    Row("3.11", "2.14", ""),
    Row("3.10", "", ""),
    Row("3.13", "", ""),
)
HEAD = (
    "| Python | torch asked for | installed | transformers asked for | installed "
    "| run | passed | failed | skipped | date |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def interpreter(release: str) -> str | None:
    """A Python of that release: of the PATH, or one that pyenv has, whose shims on the PATH need not work."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{release}.*/bin/python{release}"), reverse=True)
    for found in filter(None, (shutil.which(f"python{release}"), *map(str, installed))):
        if subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


def install(row: Row, folder: Path) -> Path:
    """An environment with what the row asks for; returns its Python."""
    found = interpreter(row.python)
    if found is None:
        raise RuntimeError(f"no Python {row.python} here")
    subprocess.run([found, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pins = [f"{name}=={release}.*" for name, release in (("torch", row.torch), ("transformers", row.transformers))]
    wanted = [pin for pin in pins if "==." not in pin]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--editable", f"{ROOT}[dev]", *wanted], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip: {done.stderr.strip().splitlines()[-1]}")
    return python


def version(python: Path, name: str) -> str:
    """The release that is installed, with what PyTorch alone says of itself: which CUDA it was built for."""
    command = f"import {name}; print({name}.__version__)"
    return subprocess.run([python, "-c", command], check=True, capture_output=True, text=True).stdout.strip()


def counts(summary: str) -> tuple[int, int, int]:
    """How many tests passed, failed or had errors, and were skipped, by pytest's last line.

    >>> counts("== 2 failed, 40 passed, 3 skipped, 1 error in 7.01s ==")
    (40, 3, 3)
    """
    found = {
        what.rstrip("s"): int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", summary)
    }
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0), found.get("skipped", 0)


def run(row: Row, tests: list[str], keep: bool, workers: str) -> str:
    """The line of `row` in the table; the whole output lies in `.compat/`."""
    name = "-".join(filter(None, ("py" + row.python, "torch" + (row.torch or "newest"), row.transformers)))
    folder, today = FOLDER / name, datetime.date.today().isoformat()
    asked = [row.python, row.torch or "newest"]
    try:
        python = install(row, folder)
        installed = [version(python, each) for each in ("torch", "transformers")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # The log names each test as it ends, so that a failure can be looked at while the others run.
        pytest = [str(python), "-m", "pytest", "-v", "-n", workers, "--dist", "loadfile", *tests]
        with (FOLDER / f"{name}.log").open("w") as log:
            subprocess.run(pytest, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        results = counts((FOLDER / f"{name}.log").read_text().strip().rpartition("\n")[2])
    except RuntimeError as why:
        return line(*asked, "-", row.transformers or "newest", "-", f"not run: {why}", "-", "-", "-", today)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    what = ", ".join(tests) or "everything"
    return line(*asked, installed[0], row.transformers or "newest", installed[1], what, *results, today)


def line(*cells: object) -> str:
    """A line of the table."""
    return f"| {' | '.join(map(str, cells))} |"


def key(text: str) -> tuple[str, ...]:
    """What tells the row of a line: what was asked for."""
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    return cells[0], cells[1], cells[3]


def write(lines: list[str]) -> None:
    """Put `lines` into the table of the page, in place of those of the same rows."""
    text = PAGE.read_text()
    before, _, rest = text.partition("\n".join(HEAD) + "\n")
    table, blank, after = rest.partition("\n\n")
    kept = {key(each): each for each in table.splitlines()} | {key(each): each for each in lines}
    PAGE.write_text(before + "\n".join([*HEAD, *kept.values()]) + (blank or "\n") + after)


def main() -> int:
    """Run what was asked for; 1 if a test failed or a row could not be run."""
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help='the torch of a row, such as 2.12, or "newest"')
    parser.add_argument("--python", action="append", help="the Python of a row, such as 3.13")
    parser.add_argument("--workers", default="auto", help="processes that run tests, as pytest's -n")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .compat")
    options = parser.parse_args(arguments[:cut])
    rows = [
        row
        for row in ROWS
        if (not options.only or (row.torch or "newest") in options.only)
        and (not options.python or row.python in options.python)
    ]
    FOLDER.mkdir(exist_ok=True)
    good = True
    for row in rows:
        text = run(row, arguments[cut + 1 :], options.keep, options.workers)
        print(text, flush=True)
        write([text])
        good &= text.split("|")[-4].strip() == "0"
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
