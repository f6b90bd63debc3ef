"""Builds a command line from a dataclass whose fields are the options, and defines the options that commands share."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

_T = TypeVar("_T")


def whole_number(text: str | int) -> int:
    """Parses an option that is a whole number."""
    try:
        return int(text)
    except ValueError:
        # typer's own message leaves out the value.
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def count(metavar: str, text: str) -> Any:
    """Returns a typer option for a whole number."""
    return typer.Option(parser=whole_number, metavar=metavar, help=text)


def file(text: str) -> Any:
    """Returns a typer option for a file to write."""
    return typer.Option(metavar="FILE", help=text)


SIZES = "6GiB, 6GB, bytes, or a share: 0.9 or 90%"
Shorthand = Annotated[
    str | None,
    typer.Option(help="checkpoint, offload, tile and cast (cast:fp16) joined by +, or the file of a Plan in JSON."),
]
Json = Annotated[Path | None, file("File for the result as JSON.")]
Seconds = Annotated[
    float, typer.Option(metavar="N", help="How long to look for something better; Ctrl-C keeps the best so far.")
]
Python = Annotated[Path | None, file("File for a script that trains the model under the plan.")]


def add(app: typer.Typer, name: str, options: type[_T], run: Callable[[_T], int], text: str) -> None:
    """Adds a command to `app` that calls `run` with an instance of `options`.

    Args:
        app: the command line.
        name: the name of the command.
        options: a dataclass whose fields are annotated with a ``typer.Option``. A field may be such a dataclass itself,
            whose fields then become options too.
        run: runs the command and returns the exit status.
        text: the help text.
    """

    def command(**given: Any) -> int:
        return run(_instance(options, given))

    # Required parameters come first, as a signature demands.
    parameters = sorted(_parameters(options), key=lambda each: each.default is not each.empty)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, help=text)(command)


def typed(options: Any) -> str:
    """Returns the fields of `options` that differ from their defaults, as typed on a command line.

    >>> from memscale.cli.step import StepOptions
    >>> typed(StepOptions(hf="my model/config.json", batch=8, keeps_output=False))
    "--hf 'my model/config.json' --batch 8 --no-keeps-output"
    """
    words: list[str] = []
    for field in sorted(dataclasses.fields(options), key=lambda field: field.default is not dataclasses.MISSING):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default or value is None:
            continue
        if dataclasses.is_dataclass(value):
            words.append(typed(value))
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        for each in value if isinstance(value, (list, tuple)) else (value,):
            words += [f"--{name}", shlex.quote(str(each))]
    return " ".join(words)


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    kinds = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        kind = kinds[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _parameters(kind)
        else:
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _instance(options: type[_T], given: Mapping[str, Any]) -> _T:
    kinds, values = get_type_hints(options), {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        kind = kinds[field.name]
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        values[field.name] = _instance(kind, given) if nested else given[field.name]
    return options(**values)
