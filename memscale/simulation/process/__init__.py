"""The process around a simulation: address space, patches of PyTorch, random generators, the garbage collector."""
