"""Measuring memory: what the allocator really did."""
