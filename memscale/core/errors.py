"""The errors memscale raises. Each message names the value, the rule it breaks and the remedy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

_Error = TypeVar("_Error", bound="MemscaleError")


class Argument(NamedTuple):
    """An argument that a message recommends. Its ``str`` is Python; a command line can spell it as an option instead.

    >>> str(Argument("Config", "enable_tiling", True)), str(Argument("tune", "at_most"))
    ('Config(enable_tiling=True)', 'tune(at_most=...)')

    Attributes:
        of: the function or class that takes the argument; ``""`` for the call that failed.
        name: the name of the argument.
        value: the value; ``...`` if the caller has to choose one.
    """

    of: str
    name: str
    value: Any = ...

    def __str__(self) -> str:
        text = f"{self.name}={'...' if self.value is ... else repr(self.value)}"
        return f"{self.of}({text})" if self.of else text


def respelled(text: str, arguments: Iterable[Argument], spell: Callable[[Argument], str]) -> str:
    """Returns `text`, which names `arguments` as Python, with each of them written by `spell`.

    >>> respelled("give a=...", [Argument("", "a")], lambda argument: f"--{argument.name}")
    'give --a'
    """
    for argument in arguments:
        text = text.replace(str(argument), spell(argument))
    return text


class MemscaleError(Exception):
    """The base of every error that memscale raises on purpose.

    Attributes:
        arguments: the arguments that the message recommends.
    """

    arguments: tuple[Argument, ...] = ()

    def naming(self: _Error, *arguments: Argument) -> _Error:
        """Returns this error, with `arguments` as those that its message recommends."""
        self.arguments = arguments
        return self

    def spelled(self, spell: Callable[[Argument], str]) -> str:
        """Returns the message with each recommended argument written by `spell`.

        >>> error = MemscaleError(f"give {Argument('tune', 'at_most')}").naming(Argument("tune", "at_most"))
        >>> error.spelled(lambda argument: f"--{argument.name}")
        'give --at_most'
        """
        return respelled(str(self), self.arguments, spell)


class ConfigError(MemscaleError, ValueError):
    """A value given to a factory or to :class:`memscale.Config` is out of range or of the wrong type."""


class PlanError(MemscaleError, ValueError):
    """A plan does not fit the model, or its text cannot be read."""


class TransformError(MemscaleError, RuntimeError):
    """A transform cannot be applied to this function, module or combination of transforms."""


class BudgetError(MemscaleError, RuntimeError):
    """No composition of transforms fits the byte budget.

    Attributes:
        peak_bytes: the smallest peak found, in bytes; `None` if none was searched for.
        plan: the plan with this peak, or `None`.
    """

    peak_bytes: int | None = None
    plan: Any = None


class RuntimeUnavailable(MemscaleError, RuntimeError):
    """A part of the runtime that a transform needs is missing (no CuPy, no device, a private name of PyTorch)."""


class CorrectnessError(MemscaleError, RuntimeError):
    """Continuing would compute a gradient that differs from the untransformed model's."""


class PolicyFallbackNeeded(MemscaleError, RuntimeError):
    """A planning policy has no answer for this model; the caller should use the next policy."""


def package(name: str, what: str, install: str | None = None) -> Any:
    """Imports a module that `what` needs.

    Args:
        name: the module.
        what: an option, a command or a function.
        install: what pip installs, if not the module's package: an extra of memscale's, such as ``"hf"``.

    Raises:
        RuntimeUnavailable: its package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        own = name.partition(".")[0]
        missing = own if install is None else f"'memscale-transforms[{install}]'"
        raise RuntimeUnavailable(f"{what} needs {own}: pip install {missing}") from error
