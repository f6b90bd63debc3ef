"""Parameters and gradients that live on another tier, above the engine."""

from memscale.runtime.parameters.mapped import MappedTensors
from memscale.runtime.parameters.movable import is_movable

__all__ = [
    "MappedTensors",
    "is_movable",
]
