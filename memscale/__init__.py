"""Train PyTorch models in less memory: memory techniques as composable, pure transforms of functions.

``transform(model, plan)`` returns a new module that trains to the same numbers; a plan is data, from module paths to
transforms such as `checkpoint`. Transforms also apply to plain functions, and inside `torch.func`. `wrap` is the
older one-line style, in place and reversible.
"""

from memscale import policies
from memscale._apply import transform
from memscale._config import AsyncOffloadConfig, Config, OptimizationMode
from memscale._errors import (
    BudgetError,
    ConfigError,
    CorrectnessError,
    MemscaleError,
    PlanError,
    PolicyFallbackNeeded,
    RuntimeUnavailable,
    TransformError,
)
from memscale._executor import Executor
from memscale._functional import functional
from memscale._legacy import detach, optimize, wrap
from memscale._plan import Plan
from memscale._transform import Transform, compose, identity
from memscale._verify import Verification, verify
from memscale.optimizers import LossScale
from memscale.profiling._hardware import Hardware
from memscale.profiling._prediction import OOMPrediction, OOMRisk
from memscale.profiling._predictor import OOMPredictor
from memscale.profiling._profile import Profile
from memscale.profiling._profiler import MemoryProfiler, profile
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
