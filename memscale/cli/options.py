"""Builds a command line from a dataclass whose fields are the options, and defines the options that commands share."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from memscale.cli.terminal import DOES_NOT_FIT
from memscale.core import Argument, BudgetError, ConfigError, MemscaleError, budget_bytes, package, wrapped

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class OptionRule:
    """A rule for the value of one option, or for each value of a repeatable one: a part of its annotation.

    Args:
        holds: whether a value follows the rule.
        text: completes the message ``--option must be ...``.
    """

    holds: Callable[[Any], bool]
    text: str

    def check(self, name: str, value: Any) -> None:
        """Raises ConfigError if `value` of the option `name` breaks the rule."""
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if not self.holds(each):
                raise ConfigError(f"--{name} must be {self.text}, got {each!r}")


def at_least(least: int) -> OptionRule:
    """Returns the rule of a number with a lower bound."""
    return OptionRule(lambda value: value >= least, f"at least {least}")


def one_of(*words: str) -> OptionRule:
    """Returns the rule of an option with a few values, in any case."""
    text = " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    return OptionRule(lambda value: value.lower() in words, text)


@dataclasses.dataclass(frozen=True)
class File:
    """The rule of a file to write: checked before any simulation."""

    suffixes: tuple[str, ...] = ()

    def check(self, name: str, path: Path) -> None:
        """Checks that the file can be written.

        Raises:
            ConfigError: the folder does not exist or cannot be written, or the suffix is wrong.
            RuntimeUnavailable: the file is a plot and matplotlib is not installed.
        """
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            raise ConfigError(f"--{name} must end in {' or '.join(self.suffixes)}, got {str(path)!r}")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise ConfigError(f"--{name} {str(path)!r} must be in a folder that exists")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"--{name} {str(path)!r} cannot be written: it is a folder, or not yours to write")
        if name == "plot":
            package("matplotlib", "--plot", "plot")


class Options:
    """A base of dataclasses whose fields are options; each instance follows the rules in its annotations.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Rows(Options):
    ...     batch: Annotated[int, count("N", "Rows."), at_least(1)] = 1
    >>> Rows(0)
    Traceback (most recent call last):
    memscale.core.errors.ConfigError: --batch must be at least 1, got 0

    Raises:
        ConfigError: an option is wrong, or two options contradict each other.
        RuntimeUnavailable: an option needs a package that is not installed.
    """

    def __post_init__(self) -> None:
        for name, value, rule in self._rules():
            if value is not None:
                rule.check(name.replace("_", "-"), value)
        self.check()

    def check(self) -> None:
        """Raises ConfigError if options contradict each other."""

    @property
    def files(self) -> dict[str, Path | None]:
        """The files to write, by the name of their option."""
        return {name: value for name, value, rule in self._rules() if isinstance(rule, File)}

    def _rules(self) -> Iterator[tuple[str, Any, OptionRule | File]]:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            for rule in getattr(kind, "__metadata__", ()):
                if isinstance(rule, (OptionRule, File)):
                    yield name, getattr(self, name), rule


def _whole_number(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        # typer's own message leaves out the value.
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def count(metavar: str, text: str) -> Any:
    """Returns a typer option for a whole number."""
    return typer.Option(parser=_whole_number, metavar=metavar, help=text)


def file(text: str) -> Any:
    """Returns a typer option for a file to write."""
    return typer.Option(metavar="FILE", help=text)


def _sizes(text: str, whole_bytes: int) -> OptionRule:
    def holds(value: str) -> bool:
        try:
            return budget_bytes(value, whole_bytes) > 0
        except ConfigError:
            return False

    return OptionRule(holds, text)


#: The switches of a Config by the names that --allow and --forbid take.
SWITCHES = {
    "checkpoint": "enable_checkpointing",
    "offload": "enable_offloading",
    "tile": "enable_tiling",
    "cast": "use_mixed_precision",
}
SIZES = "6GiB, 6GB, bytes, or a share: 0.9 or 90%"
SIZE = _sizes(SIZES, 1 << 60)
BYTES = _sizes("6GiB, 6GB or bytes", 0)  # a share of nothing is no size
Shorthand = Annotated[
    str | None,
    typer.Option(help="checkpoint, offload, tile and cast (cast:fp16) joined by +, or the file of a Plan in JSON."),
]
Seconds = Annotated[
    float,
    typer.Option(metavar="N", help="How long to look for something better; Ctrl-C keeps the best so far."),
    at_least(0),
]
PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Json = Annotated[Path | None, file("File for the result as JSON."), File()]
Plot = Annotated[Path | None, file("File for a picture, a .png or .svg."), File((".png", ".svg"))]
Html = Annotated[Path | None, file("File for a page, a .html."), File((".html", ".htm"))]
Python = Annotated[Path | None, file("File for a script that trains the model under the plan."), File()]


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
        try:
            return run(_instance(options, given))
        except MemscaleError as error:
            fits_nothing = isinstance(error, BudgetError)
            text = f"memscale: {error.spelled(lambda argument: as_option(argument, given))}"
            print(wrapped(text) if fits_nothing else text, file=sys.stderr)
            return DOES_NOT_FIT if fits_nothing else 2

    # Required parameters come first, as a signature demands.
    parameters = sorted(_parameters(options), key=lambda each: each.default is not each.empty)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, help=text)(command)


def as_option(argument: Argument, known: Collection[str]) -> str:
    """Returns an argument of the library as an option of a command with the options `known`, else as Python.

    >>> as_option(Argument("tune", "at_most"), {"at_most"}), as_option(Argument("Adam", "fused", True), {"optimizer"})
    ('--at-most', '--optimizer adam-fused')
    """
    names = {switch: name for name, switch in SWITCHES.items()}
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
