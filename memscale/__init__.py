"""Train PyTorch models in less memory: memory techniques as composable, pure transforms of functions.

``transform(model, plan)`` returns a new module that trains to the same numbers; a plan is data, from module paths to
transforms such as `checkpoint`. Transforms also apply to plain functions, and inside `torch.func`. `wrap` is the
older one-line style, in place and reversible.
"""

from memscale import policies
from memscale.algebra.apply import transform
from memscale.algebra.composition import Transform, compose, identity
from memscale.algebra.functions import functional
from memscale.algebra.plan import Plan
from memscale.core.errors import (
    BudgetError,
    ConfigError,
    CorrectnessError,
    MemscaleError,
    PlanError,
    PolicyFallbackNeeded,
    RuntimeUnavailable,
    TransformError,
)
from memscale.hardware.device import Hardware
from memscale.inspection.verification import Verification, verify
from memscale.legacy.executor import Executor
from memscale.legacy.verbs import detach, optimize, wrap
from memscale.optimizers import LossScale
from memscale.planning.config import Config, OptimizationMode
from memscale.planning.prediction import OOMPrediction, OOMRisk
from memscale.planning.predictor import OOMPredictor
from memscale.runtime.config import AsyncOffloadConfig
from memscale.simulation.profiler import MemoryProfiler, profile
from memscale.simulation.results import Profile
from memscale.transforms import Residual, cast, checkpoint, name, offload, saved_residuals, tile

__version__ = "0.1.0"

__all__ = [
    "AsyncOffloadConfig",
    "BudgetError",
    "Config",
    "ConfigError",
    "CorrectnessError",
    "Executor",
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
    "Transform",
    "TransformError",
    "Verification",
    "cast",
    "checkpoint",
    "compose",
    "detach",
    "functional",
    "identity",
    "name",
    "offload",
    "optimize",
    "policies",
    "profile",
    "saved_residuals",
    "tile",
    "transform",
    "verify",
    "wrap",
]
