"""Train PyTorch models in less memory: memory techniques as composable, pure transforms of functions.

``transform(model, plan)`` returns a new module that trains to the same numbers. A plan is data: it maps module paths to
transforms such as `checkpoint`. Transforms also apply to plain functions, and inside `torch.func`. `wrap` makes and
applies a plan in one line, in place and reversibly.
"""

import gc
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memscale import policies
    from memscale.algebra import Plan, Transform, compose, functional, identity, transform
    from memscale.config import Config, OptimizationMode
    from memscale.core import (
        BudgetError,
        ConfigError,
        CorrectnessError,
        MemscaleError,
        PlanError,
        PolicyFallbackNeeded,
        RuntimeUnavailable,
        TransformError,
    )
    from memscale.crashes import Explanation, explain
    from memscale.hardware import Hardware
    from memscale.inspection import Residual, Verification, saved_residuals, verify
    from memscale.legacy import Executor, detach, optimize, report, wrap
    from memscale.optimizers import (
        LossScale,
        compensate_rounding,
        offload_states,
        quantize_states,
        round_stochastically,
        step_in_backward,
        step_in_groups,
    )
    from memscale.planning import (
        AutoTuner,
        DecisionEngine,
        Frontier,
        OOMPrediction,
        OOMPredictor,
        OOMRisk,
        Tuning,
    )
    from memscale.policy import StrategyContext, StrategyDecision
    from memscale.runtime import AsyncOffloadConfig
    from memscale.simulation import MemoryProfiler, Profile
    from memscale.simulation.measured import measure
    from memscale.transforms import cast, checkpoint, name, offload, tile
    from memscale.verbs import frontier, plan, profile

__version__ = "0.2.0"

__all__ = [
    "AsyncOffloadConfig",
    "AutoTuner",
    "BudgetError",
    "Config",
    "ConfigError",
    "CorrectnessError",
    "DecisionEngine",
    "Executor",
    "Explanation",
    "Frontier",
    "Hardware",
    "LossScale",
    "MemoryProfiler",
    "MemscaleError",
    "OOMPrediction",
    "OOMPredictor",
    "OOMRisk",
    "OptimizationMode",
    "Plan",
    "PlanError",
    "PolicyFallbackNeeded",
    "Profile",
    "Residual",
    "RuntimeUnavailable",
    "StrategyContext",
    "StrategyDecision",
    "Transform",
    "TransformError",
    "Tuning",
    "Verification",
    "cast",
    "checkpoint",
    "compensate_rounding",
    "compose",
    "detach",
    "explain",
    "frontier",
    "functional",
    "identity",
    "measure",
    "name",
    "offload",
    "offload_states",
    "optimize",
    "plan",
    "policies",
    "profile",
    "quantize_states",
    "report",
    "round_stochastically",
    "saved_residuals",
    "step_in_backward",
    "step_in_groups",
    "tile",
    "transform",
    "verify",
    "wrap",
]

# Each name is imported on first use, since a training run needs few of them, and the command's help none. The branch
# for type checkers above has the same names; a test compares the two.
_LOADED_WHEN_ASKED = {
    name: f"memscale.{door}"
    for door, names in {
        "algebra": "Plan Transform compose functional identity transform",
        "config": "Config OptimizationMode",
        "core": "BudgetError ConfigError CorrectnessError MemscaleError PlanError PolicyFallbackNeeded "
        "RuntimeUnavailable TransformError",
        "crashes": "Explanation explain",
        "hardware": "Hardware",
        "inspection": "Residual Verification saved_residuals verify",
        "legacy": "Executor detach optimize report wrap",
        "optimizers": "LossScale compensate_rounding offload_states quantize_states round_stochastically "
        "step_in_backward step_in_groups",
        "planning": "AutoTuner DecisionEngine Frontier OOMPrediction OOMPredictor OOMRisk Tuning",
        "policy": "StrategyContext StrategyDecision",
        "runtime": "AsyncOffloadConfig",
        "simulation": "MemoryProfiler Profile",
        "simulation.measured": "measure",
        "transforms": "cast checkpoint name offload tile",
        "verbs": "frontier plan profile",
    }.items()
    for name in names.split()
}

_FOLDERS = ("algebra", "core", "policies", "runtime", "transforms")


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_ASKED and name not in _FOLDERS:
        raise AttributeError(f"module 'memscale' has no attribute {name!r}")
    # The import makes so many objects that Python would run garbage collections over all of PyTorch, and find nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        if name in _FOLDERS:
            return importlib.import_module(f"memscale.{name}")
        from memscale.core import internals

        door = _LOADED_WHEN_ASKED[name]
        if (part := door.split(".")[1]) in internals.PARTS:
            internals.needs(part)
        value = getattr(importlib.import_module(door), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
