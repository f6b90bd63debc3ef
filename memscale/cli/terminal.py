"""Output that commands share: progress on stderr, files, and printing at 80 columns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memscale.core import ConfigError, wrapped

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

#: The content of a file: a text, or a function that writes the file.
Content = str | Callable[[Path], object]
#: A function of the next simulation's name, the number of finished simulations, and their total number if known.
Progress = Callable[[str, int, int | None], None]

#: Exit statuses, besides 0 for success, 1 for a failed check and 2 for bad input.
DOES_NOT_FIT, INTERRUPTED = 3, 130

_QUIET_SECONDS = 2.0


@contextmanager
def simulations() -> Iterator[Progress]:
    """Gives a progress bar on stderr that counts simulations; it pulses while their total number is unknown.

    Without a terminal it prints a line from time to time, and nothing for short work.
    """
    from rich.console import Console

    if not Console(stderr=True).is_terminal:
        began = said = time.monotonic()

        def say(what: str, done: int, total: int | None) -> None:
            nonlocal said
            if time.monotonic() - said >= _QUIET_SECONDS:
                said = time.monotonic()
                count = f"{done}/{total} steps" if total else f"{done} step{'s' * (done != 1)}"
                text = f"{count} simulated after {said - began:.0f} s; now: {what}"
                print(wrapped(text), file=sys.stderr, flush=True)

        yield say
        return
    with progress("simulating") as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def progress(name: str) -> Bar:
    """Returns a bar on stderr, which is gone at its end: a name, what is done of how much, the time, and a task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True)


def write(options: object, contents: Mapping[str, Content]) -> None:
    """Writes each of `contents` to the file that the option of its name names, if it is given.

    Raises:
        ConfigError: a file cannot be written.
    """
    for option, content in contents.items():
        if (path := getattr(options, option)) is not None:
            try:
                if isinstance(content, str):
                    path.write_text(content, encoding="utf-8")
                else:
                    content(path)
            except OSError as error:
                raise ConfigError(f"--{option} {str(path)!r} cannot be written: {error.strerror or error}") from error


def show(text: str) -> None:
    """Prints `text` wrapped at 80 columns; a command to type stays on one line."""
    from rich.console import Console

    Console(soft_wrap=True, highlight=False, markup=False).print(
        "\n".join(line if line.startswith("next: ") else wrapped(line) for line in text.split("\n"))
    )
