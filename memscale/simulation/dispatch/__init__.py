"""The dispatch mode of a simulation: returns fake tensors from operators, and records the trace."""
