"""The empirical way: real steps, seen through the allocator's events."""

from memscale.simulation.measured.allocator_trace import AllocatorTrace, measure, training_roles

__all__ = [
    "AllocatorTrace",
    "measure",
    "training_roles",
]
