"""A replay of PyTorch's CUDA caching allocator."""
