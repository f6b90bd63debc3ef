"""The errors memscale raises. Each message names the value, the rule it breaks and the remedy."""

from __future__ import annotations

from typing import Any


class MemscaleError(Exception):
    """The root of every error that memscale raises on purpose."""


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
