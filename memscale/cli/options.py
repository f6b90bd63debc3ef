"""The options of a command are the fields of a dataclass: how they become a command line, and what several share."""

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
    """A parser for options that are counts."""
    try:
        return int(text)
    except ValueError:
        # typer's own message leaves out the value.
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def count(metavar: str, text: str) -> Any:
    """An option that is a whole number."""
    return typer.Option(parser=whole_number, metavar=metavar, help=text)


def file(text: str) -> Any:
    """An option that is a file to write."""
    return typer.Option(metavar="FILE", help=text)


SIZES = "6GiB, 6GB, bytes, or a share: 0.9 or 90%"
Shorthand = Annotated[
    str | None,
    typer.Option(help="checkpoint, offload, tile and cast (cast:fp16) joined by +, or the file of a Plan in JSON."),
]
Json = Annotated[Path | None, file("Where the result goes as JSON.")]
Seconds = Annotated[
    float, typer.Option(metavar="N", help="How long to look for something better; Ctrl-C keeps the best so far.")
]
Python = Annotated[Path | None, file("Where a script goes that trains the model under the plan.")]


def add(app: typer.Typer, name: str, options: type[_T], run: Callable[[_T], int], text: str) -> None:
    """Give `app` a command that calls `run` with `options`; a field that is such a dataclass stands for its own fields.

    Args:
        app: to add to.
        name: of the command.
        options: a dataclass whose fields are annotated with a ``typer.Option``, or are dataclasses of such.
        run: what the command does; returns the exit status.
        text: what ``--help`` says.
    """

    def command(**given: Any) -> int:
        return run(_made(options, given))

    # What must be given comes first.
    parameters = sorted(_parameters(options), key=lambda each: each.default is not each.empty)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, help=text)(command)


def typed(options: Any) -> str:
    """The fields of `options` that differ from their defaults, as they are typed.

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


def _made(options: type[_T], given: Mapping[str, Any]) -> _T:
    kinds, values = get_type_hints(options), {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        kind = kinds[field.name]
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        values[field.name] = _made(kind, given) if nested else given[field.name]
    return options(**values)
