"""The empirical way: real steps, seen through the allocator's events."""
