"""`VerbCall`: the facts about a call that are counted, all from closed lists, read from its arguments and result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from memscale.core import BudgetError, CorrectnessError, RuntimeUnavailable, TransformError
from memscale.telemetry import counters

_ERRORS = {
    BudgetError: "budget_error",
    CorrectnessError: "correctness_error",
    RuntimeUnavailable: "runtime_unavailable",
    TransformError: "transform_error",
}


@dataclass
class VerbCall:
    """A call of a verb: its arguments and, when it has ended, its result or error."""

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
        given = self.args[0] if self.args else self.kwargs.get("model", self.kwargs.get("target"))
        return given if isinstance(given, nn.Module) else getattr(given, "model", None)

    def facts(self) -> Iterator[str]:
        """Yields the buckets of the call as ``name:bucket``; unknown ones are left out."""
        for name, dimension in counters.DIMENSIONS.items():
            if self.verb in dimension.calls:
                with contextlib.suppress(Exception):  # an argument of the wrong type raises any error: no fact then
                    found = _TELLERS[name](self)
                    for bucket in (found,) if isinstance(found, str) else found:
                        if bucket in dimension.buckets:
                            yield f"{name}:{bucket}"


def _executor_in(result: Any) -> Any:
    model = result if isinstance(result, nn.Module) else getattr(result, "model", None)
    return getattr(model, "__dict__", {}).get("_memscale_executor")


def _techniques(call: VerbCall) -> list[str]:
    plan: Any = call.kwargs.get("plan", call.args[1] if len(call.args) > 1 else None)
    if (executor := _executor_in(call.result)) is not None:
        plan = executor.plan
    elif hasattr(call.result, "evidence"):
        plan = call.result
    transforms = plan.values() if isinstance(plan, Mapping) else (rule.transform for rule in plan)
    names = {part.spelling for each in transforms for part in getattr(each, "transforms", (each,))}
    return [name for name in counters.DIMENSIONS["technique"].buckets if name in names]


def _outcome(call: VerbCall) -> str:
    if call.error is not None:
        return next((name for kind, name in _ERRORS.items() if isinstance(call.error, kind)), "other_error")
    executor = _executor_in(call.result)
    skipped = executor is not None and executor.skipped is not None
    return "skipped" if skipped or getattr(call.result, "fits", True) is False else "fits"


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


_TELLERS: dict[str, Callable[[VerbCall], str | list[str]]] = {
    "params": lambda call: counters.bucket("params", _size(call.model)),
    "technique": _techniques,
    "outcome": _outcome,
    "peak_error": lambda call: counters.bucket("peak_error", call.before.peak_error),
}
