"""The errors memscale raises. Each message names the value, the rule it breaks and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Error = TypeVar("_Error", bound="MemscaleError")


class Argument(NamedTuple):
    """An argument that a message advises, as data: its ``str`` is Python, and a command line spells it as an option.

    >>> str(Argument("Config", "enable_tiling", True)), str(Argument("tune", "at_most"))
    ('Config(enable_tiling=True)', 'tune(at_most=...)')

    Attributes:
        of: what takes it; ``""`` for the call that failed.
        name: of the argument.
        value: ``...`` where the caller has to choose one.
    """

    of: str
    name: str
    value: Any = ...

    def __str__(self) -> str:
        text = f"{self.name}={'...' if self.value is ... else repr(self.value)}"
        return f"{self.of}({text})" if self.of else text


class MemscaleError(Exception):
    """The root of every error that memscale raises on purpose.

    Attributes:
        arguments: those that the message advises.
    """

    arguments: tuple[Argument, ...] = ()

    def naming(self: _Error, *arguments: Argument) -> _Error:
        """This error, with the arguments that its message advises."""
        self.arguments = arguments
        return self

    def spelled(self, spell: Callable[[Argument], str]) -> str:
        """The message with its arguments as `spell` writes them.

        >>> error = MemscaleError(f"give {Argument('tune', 'at_most')}").naming(Argument("tune", "at_most"))
        >>> error.spelled(lambda argument: f"--{argument.name}")
        'give --at_most'
        """
        text = str(self)
        for argument in self.arguments:
            text = text.replace(str(argument), spell(argument))
        return text


class ConfigError(MemscaleError, ValueError):
    """A value given to a factory or to :class:`memscale.Config` is out of range or of the wrong type."""


class PlanError(MemscaleError, ValueError):
    """A plan does not describe this model, or its text cannot be read back."""


class TransformError(MemscaleError, RuntimeError):
    """A transform cannot be applied to this function, module or combination of transforms."""


class BudgetError(MemscaleError, RuntimeError):
    """No composition of transforms fits the byte budget.

    Attributes:
        peak_bytes: the smallest peak that can be reached, None where that was not looked for.
        plan: the plan that reaches it.
    """

    peak_bytes: int | None = None
    plan: Any = None


class RuntimeUnavailable(MemscaleError, RuntimeError):
    """The part of the runtime that a transform needs is not there (no CuPy, no device, not built yet)."""


class CorrectnessError(MemscaleError, RuntimeError):
    """Going on would give a gradient that differs from the untransformed model's."""


class PolicyFallbackNeeded(MemscaleError, RuntimeError):
    """A planning policy has no answer for this model; the caller should use the next policy."""
