"""`VerbCall`: the facts about a call that are counted, all from closed lists, read from its arguments and result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from memscale.core import BudgetError, CorrectnessError, RuntimeUnavailable, TransformError
from memscale.telemetry.counters import DIMENSIONS

_ERRORS = {
    BudgetError: "budget_error",
    CorrectnessError: "correctness_error",
    RuntimeUnavailable: "runtime_unavailable",
    TransformError: "transform_error",
}


@dataclass
class VerbCall:
    """A call of a verb: its arguments and, when it has ended, its result or error.

    Each dimension has a method of its name, which returns the buckets of the call.
    """

    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.before: Any = None  # the model's executor before the call
        with contextlib.suppress(Exception):  # a property of the caller's class may raise any error
            self.before = _executor_in(self.model)

    @property
    def model(self) -> Any:
        """The model that the verb was given, or the model of a predictor or trainer."""
        return _module_in(self.args[0] if self.args else self.kwargs.get("model", self.kwargs.get("target")))

    def facts(self) -> Iterator[str]:
        """Yields the buckets of the call as ``name:bucket``; unknown ones are left out."""
        for name, dimension in DIMENSIONS.items():
            if self.verb in dimension.calls:
                with contextlib.suppress(Exception):  # an argument of the wrong type raises any error: no fact then
                    for bucket in getattr(self, name)():
                        yield f"{name}:{bucket}"

    def params(self) -> list[str]:
        """The size of the model."""
        return [DIMENSIONS["params"].bucket(sum(each.numel() for each in self.model.parameters()))]

    def technique(self) -> list[str]:
        """The transforms of the plan that the verb made or was given."""
        plan: Any = self.kwargs.get("plan", self.args[1] if len(self.args) > 1 else None)
        if (executor := _executor_in(self.result)) is not None:
            plan = executor.plan
        elif hasattr(self.result, "evidence"):
            plan = self.result
        transforms = plan.values() if isinstance(plan, Mapping) else (rule.transform for rule in plan)
        names = {part.spelling for each in transforms for part in getattr(each, "transforms", (each,))}
        return [name for name in DIMENSIONS["technique"].buckets if name in names]

    def outcome(self) -> list[str]:
        """Whether the plan fits, nothing was to be done, or which error ended the call."""
        if self.error is not None:
            return [next((name for kind, name in _ERRORS.items() if isinstance(self.error, kind)), "other_error")]
        skipped = getattr(_executor_in(self.result), "skipped", None) is not None
        return ["skipped" if skipped or getattr(self.result, "fits", True) is False else "fits"]

    def peak_error(self) -> list[str]:
        """The error of the predicted peak, once both peaks are known."""
        return [DIMENSIONS["peak_error"].bucket(self.before.peak_error)]


def _module_in(value: Any) -> Any:
    return value if isinstance(value, nn.Module) else getattr(value, "model", None)


def _executor_in(value: Any) -> Any:
    return getattr(_module_in(value), "__dict__", {}).get("_memscale_executor")
