"""The offload engine: tensors out to another tier and back, in time."""
