"""PyTorch's CUDA caching allocator, replayed."""
