"""The kernels of the simulated device: their result layouts, their scratch memory and their times."""
