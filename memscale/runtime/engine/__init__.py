"""The offload engine: copies tensors to another tier, and back before they are needed."""

from memscale.runtime.engine.offload_engine import Engine
