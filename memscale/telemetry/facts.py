"""What is told of a call, from closed lists only: read off its arguments and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from memscale.core import BudgetError, CorrectnessError, RuntimeUnavailable, TransformError
from memscale.telemetry.counters import DIMENSIONS, below, decade, peak_error
from memscale.telemetry.structure import architecture_of

_ERRORS = {
    BudgetError: "budget_error",
    CorrectnessError: "correctness_error",
    RuntimeUnavailable: "runtime_unavailable",
    TransformError: "transform_error",
}
_EXECUTOR = "_memscale_executor"


def subject_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The executor of the model of a call, as it is before the call."""
    with contextlib.suppress(Exception):
        return vars(_model_in(args, kwargs)).get(_EXECUTOR)
    return None


def facts_of(
    call: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, error: Exception | None, before: Any
) -> Iterator[str]:
    """The buckets of a call, as ``name:bucket``; those that cannot be told are left out."""
    tellers = {
        "params": lambda: [decade(sum(each.numel() for each in _model_in(args, kwargs).parameters()))],
        "architecture": lambda: [architecture_of(_model_in(args, kwargs))],
        "technique": lambda: _techniques(result, args, kwargs),
        "mode": lambda: [str(_given("config", args, kwargs).mode.value)],
        "pressure": lambda: [below(_pressure(result), "pressure")],
        "outcome": lambda: [_outcome(result, error)],
        "decision_source": lambda: [_decision_source(result)],
        "peak_error": lambda: [peak_error(before.peak_error)],
    }
    for dimension in DIMENSIONS:
        if call in dimension.calls:
            with contextlib.suppress(Exception):
                for bucket in tellers[dimension.name]():
                    if bucket in dimension.buckets:
                        yield f"{dimension.name}:{bucket}"


def _model_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> nn.Module:
    """The model that a verb was given, or a predictor's, or a trainer's."""
    given = args[0] if args else kwargs.get("model", kwargs.get("target"))
    found = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    if not isinstance(found, nn.Module):
        raise LookupError
    return found


def _given(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get(name) or next(each for each in args if type(each).__name__.lower() == name)


def _executor_in(result: Any) -> Any:
    model = result if isinstance(result, nn.Module) else getattr(result, "model", None)
    return None if model is None else vars(model).get(_EXECUTOR)


def _techniques(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    executor = _executor_in(result)
    plan = executor.plan if executor is not None else kwargs.get("plan", args[1] if len(args) > 1 else None)
    text = repr(result if hasattr(result, "evidence") else plan)
    known = next(each.buckets for each in DIMENSIONS if each.name == "technique")
    return [name for name in known if f" {name}(" in text or f"({name}(" in text]


def _decision_source(result: Any) -> str:
    executor = _executor_in(result)
    plan = result if executor is None else executor.plan
    if not hasattr(plan, "evidence"):
        raise LookupError
    return "user_config" if plan.decision is None else str(plan.decision.decision_source)


def _pressure(result: Any) -> float:
    """What the step takes as it is, as a share of what it may."""
    if (evidence := getattr(result, "evidence", None)) is not None:
        return float(evidence.plain.taken_bytes / evidence.budget_bytes)
    if hasattr(result, "capacity_bytes"):
        return float(result.peak_bytes / result.capacity_bytes)
    executor = _executor_in(result)
    if executor.profile is None:
        raise LookupError
    return float(executor.step_bytes / (executor.config.target_gpu_utilization * executor.hardware.memory_bytes))


def _outcome(result: Any, error: Exception | None) -> str:
    if error is not None:
        return next((name for kind, name in _ERRORS.items() if isinstance(error, kind)), "other_error")
    executor = _executor_in(result)
    skipped = executor is not None and executor.skipped is not None
    return "skipped" if skipped or getattr(result, "fits", True) is False else "fits"
