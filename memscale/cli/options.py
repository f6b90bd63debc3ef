"""Builds a command line from a dataclass whose fields are the options, and defines the options that commands share."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from memscale.cli.terminal import DOES_NOT_FIT
from memscale.core import SWITCHES, Argument, BudgetError, ConfigError, MemscaleError, budget_bytes, package, wrapped

_T = TypeVar("_T")


def choice(text: str, *words: str, metavar: str) -> Any:
    """Returns a typer option, which may be repeatable, for a few values in any case; its value is in small letters."""

    def check(value: str | list[str] | None) -> Any:
        for each in [value] if isinstance(value, str) else value or ():
            if each.lower() not in words:
                raise typer.BadParameter(f"must be one of {', '.join(words)}, got {each!r}")
        return value.lower() if isinstance(value, str) else value and [each.lower() for each in value]

    return typer.Option(metavar=metavar, help=text, callback=check)


def number(text: str, *, least: float, metavar: str = "N") -> Any:
    """Returns a typer option for a number with a lower bound."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value < math.inf:
            raise typer.BadParameter(f"must be at least {least:g}, got {value}")
        return value

    return typer.Option(metavar=metavar, help=text, callback=check)


def size(text: str, *, may_be_share: bool = True, may_be_zero: bool = False) -> Any:
    """Returns a typer option for a number of bytes."""
    spellings = "6GiB, 6GB, bytes, or a share: 0.9 or 90%" if may_be_share else "6GiB, 6GB or bytes"

    def check(value: str | None) -> str | None:
        if value is None or (value == "0" and may_be_zero):
            return value
        try:
            is_size = budget_bytes(value, 1 << 60 if may_be_share else 0) > 0
        except ConfigError:
            is_size = False
        if not is_size:
            raise typer.BadParameter(f"must be {spellings}, got {value!r}")
        return value

    return typer.Option(metavar="SIZE", help=f"{text}: {spellings}.", callback=check)


def file(text: str, *suffixes: str) -> Any:
    """Returns a typer option for a file to write, which is checked before any simulation."""

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        if suffixes and path.suffix.lower() not in suffixes:
            raise typer.BadParameter(f"must end in {' or '.join(suffixes)}, got {str(path)!r}")
        folder = path.resolve().parent
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{str(path)!r} must be a file in a folder that exists and is yours to write")
        if ".png" in suffixes:
            package("matplotlib", "a picture", "plot")
        return path

    return typer.Option(metavar="FILE", help=text, callback=check)


class Options:
    """A base of dataclasses whose fields are options, each with a ``typer.Option`` in its annotation.

    Raises:
        ConfigError: two options contradict each other.
    """

    def __post_init__(self) -> None:
        for kind in type(self).__mro__:
            if check := vars(kind).get("check"):
                check(self)

    def check(self) -> None:
        """Raises ConfigError if options of this class contradict each other."""


#: The switches of a Config by the names that --allow and --forbid take; 8-bit states have --stepping.
ALLOWED = {name: switch for name, switch in SWITCHES.items() if name != "quantize_states"}
Shorthand = Annotated[
    str | None, typer.Option(help="checkpoint, offload, tile and cast joined by +, or the file of a Plan in JSON.")
]
Seconds = Annotated[float, number("How long to look for something better; Ctrl-C keeps the best so far.", least=0)]
PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Json = Annotated[Path | None, file("File for the result as JSON.")]
Plot = Annotated[Path | None, file("File for a picture, a .png or .svg.", ".png", ".svg")]
Html = Annotated[Path | None, file("File for a page, a .html.", ".html", ".htm")]
Python = Annotated[Path | None, file("File for a script that trains the model under the plan.")]


def add(app: typer.Typer, name: str, options: type[_T], run: Callable[[_T], int | None], text: str) -> None:
    """Adds a command to `app` that calls `run` with an instance of `options`.

    Args:
        app: the command line.
        name: the name of the command.
        options: a dataclass of `Options`.
        run: runs the command and returns the exit status; `None` is 0.
        text: the help text.
    """

    def command(**given: Any) -> int | None:
        try:
            return run(options(**given))
        except MemscaleError as error:
            fits_nothing = isinstance(error, BudgetError)
            text = f"memscale: {error.spelled(lambda argument: as_option(argument, given))}"
            print(wrapped(text) if fits_nothing else text, file=sys.stderr)
            return DOES_NOT_FIT if fits_nothing else 2

    kinds, signature = get_type_hints(options, include_extras=True), inspect.signature(options)
    parameters = [each.replace(annotation=kinds[each.name]) for each in signature.parameters.values()]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = kinds
    app.command(name, help=text)(command)


def as_option(argument: Argument, known: Collection[str]) -> str:
    """Returns an argument of the library as an option of a command with the options `known`, else as Python.

    >>> as_option(Argument("tune", "at_most"), {"at_most"}), as_option(Argument("Adam", "fused", True), {"optimizer"})
    ('--at-most', '--optimizer adam-fused')
    """
    names = {switch: name for name, switch in ALLOWED.items()}
    if argument.of == "Config" and argument.name in names and "allow" in known:
        return f"--allow {names[argument.name]}"
    if argument.name == "fused" and "optimizer" in known:
        return f"--optimizer {argument.of.lower()}-fused"
    if argument.name == "loss" and "hf" in known:
        return "loss in the (model, batch_fn, loss) of --hf"
    if argument.name == "hardware" and "gpu" in known:
        return "--gpu"
    if argument.name not in known:
        return str(argument)
    option = f"--{argument.name.replace('_', '-')}"
    values = argument.value if isinstance(argument.value, (list, tuple)) else (argument.value,)
    return option if argument.value is ... else " ".join(f"{option} {shlex.quote(str(each))}" for each in values)


def typed(options: Options, kind: type) -> str:
    """Returns the fields of `kind` that differ from their defaults in `options`, as typed on a command line.

    >>> from memscale.cli.step_options import StepOptions
    >>> typed(StepOptions(hf="my model/config.json", batch=8, keeps_output=False), StepOptions)
    "--hf 'my model/config.json' --batch 8 --no-keeps-output"
    """
    words: list[str] = []
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.default is not dataclasses.MISSING):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        for each in value if isinstance(value, (list, tuple)) else (value,):
            words += [f"--{name}", shlex.quote(str(each))]
    return " ".join(words)
