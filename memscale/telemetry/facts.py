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
        with contextlib.suppress(Exception):  # a fact that cannot be determined is left out
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
                with contextlib.suppress(Exception):  # an argument may be of the wrong type
                    found = _TELLERS[name](self)
                    for bucket in (found,) if isinstance(found, str) else found:
                        if bucket in dimension.buckets:
                            yield f"{name}:{bucket}"


def _executor_in(result: Any) -> Any:
    model = result if isinstance(result, nn.Module) else getattr(result, "model", None)
    return getattr(model, "__dict__", {}).get("_memscale_executor")


def _plan_of(call: VerbCall) -> Any:
    """Returns the plan that a call made or was given."""
    if (executor := _executor_in(call.result)) is not None:
        return executor.plan
    given = call.kwargs.get("plan", call.args[1] if len(call.args) > 1 else None)
    return call.result if hasattr(call.result, "evidence") else given


def _techniques(call: VerbCall) -> list[str]:
    plan = _plan_of(call)
    transforms = plan.values() if isinstance(plan, Mapping) else (rule.transform for rule in plan)
    names = {part.spelling for each in transforms for part in getattr(each, "transforms", (each,))}
    return [name for name in counters.DIMENSIONS["technique"].buckets if name in names]


def _mode(call: VerbCall) -> str:
    config = call.kwargs.get("config") or next(each for each in call.args if type(each).__name__ == "Config")
    return str(config.mode.value)


def _pressure(call: VerbCall) -> str:
    """Returns the bucket of the untransformed step's bytes over the allowed bytes."""
    result, executor = call.result, _executor_in(call.result)
    if (evidence := getattr(result, "evidence", None)) is not None:
        share = evidence.plain.taken_bytes / evidence.budget_bytes
    elif hasattr(result, "capacity_bytes"):
        share = result.peak_bytes / result.capacity_bytes
    else:
        assert executor.profile is not None, "nothing was profiled, and nothing is told"
        share = executor.step_bytes / (executor.config.target_gpu_utilization * executor.hardware.memory_bytes)
    return counters.bucket("pressure", share)


def _outcome(call: VerbCall) -> str:
    if call.error is not None:
        return next((name for kind, name in _ERRORS.items() if isinstance(call.error, kind)), "other_error")
    executor = _executor_in(call.result)
    skipped = executor is not None and executor.skipped is not None
    return "skipped" if skipped or getattr(call.result, "fits", True) is False else "fits"


def architecture_of(model: nn.Module) -> str:
    """Returns the kind of a model by the shapes of its parameters; names of classes and modules are not read.

    >>> import torch
    >>> architecture_of(torch.nn.Conv2d(3, 8, 3)), architecture_of(torch.nn.LSTM(4, 4))
    ('convnet', 'recurrent')
    """
    modules = list(model.modules())
    total = _size(model)
    embeddings = [each for each in modules if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    embedded = sum(map(_size, embeddings))
    recurrent = sum(_size(each) for each in modules if isinstance(each, (nn.RNNBase, nn.RNNCellBase)))
    convolved = sum(each.numel() for each in model.parameters() if each.dim() in (4, 5))
    stacks = [each for each in modules if isinstance(each, (nn.ModuleList, nn.Sequential)) and _is_a_stack(each)]
    attending = [stack for stack in stacks if _attends(stack[0])]
    lists = [part for stack in stacks for block in stack for part in block.modules() if isinstance(part, nn.ModuleList)]
    fused = any(each.dim() == 3 and len(each) >= 4 and min(each.shape) > 4 for each in model.parameters())
    tables = {each.weight.shape for each in embeddings}
    kinds = {
        "other": not total,
        "recurrent": 2 * recurrent > total - embedded,
        "embedding": embedded > 0.8 * total,
        "mixture": fused or any(_is_a_stack(each) and len(each) >= 4 and not _attends(each[0]) for each in lists),
        "convnet": 2 * convolved > total,
        "state_space": any(_scans(stack[0]) for stack in stacks),
        "encoder_decoder": len({_shapes(stack[0]) for stack in attending}) > 1,
        "decoder": attending and any(isinstance(each, nn.Linear) and each.weight.shape in tables for each in modules),
        "encoder": attending,
    }
    return next((kind for kind, holds in kinds.items() if holds), "other")


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in module.parameters())


def _is_a_stack(parts: nn.ModuleList | nn.Sequential) -> bool:
    """Whether there are several parts, all with parameters of the same shapes."""
    shapes = {_shapes(each) for each in parts}
    return len(parts) > 1 and len(shapes) == 1 and shapes != {()}


def _attends(block: nn.Module) -> bool:
    """Whether the block has enough matrices for queries, keys, values, an output and a feed-forward layer."""
    matrices = [each for each in block.parameters() if each.dim() == 2]
    return len(matrices) >= 4 and len({min(each.shape) for each in matrices}) <= 3 and len(list(block.modules())) > 5


def _scans(block: nn.Module) -> bool:
    """Whether the block has a depthwise convolution over the sequence."""
    return any(isinstance(each, nn.Conv1d) and each.groups == each.in_channels > 1 for each in block.modules())


_TELLERS: dict[str, Callable[[VerbCall], str | list[str]]] = {
    "params": lambda call: counters.bucket("params", _size(call.model)),
    "architecture": lambda call: architecture_of(call.model),
    "technique": _techniques,
    "mode": _mode,
    "pressure": _pressure,
    "outcome": _outcome,
    "decision_source": lambda call: str(_plan_of(call).decision.decision_source),
    "peak_error": lambda call: counters.bucket("peak_error", call.before.peak_error),
}
