"""Empirical profiles: real steps, measured by the events of PyTorch's allocators."""

from memscale.simulation.measured.allocator_trace import AllocatorTrace, measure, training_roles
