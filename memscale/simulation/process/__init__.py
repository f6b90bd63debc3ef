"""What a simulation uses and shields of its process: address space, patches of PyTorch, generators, the collector."""
