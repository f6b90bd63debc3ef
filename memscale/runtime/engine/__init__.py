"""The offload engine: tensors out to another tier and back, in time."""

from memscale.runtime.engine.engine import Engine

__all__ = ["Engine"]
