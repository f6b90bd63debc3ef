"""What the kernels of the target device return and take."""
