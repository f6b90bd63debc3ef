"""The dispatch mode of a simulation: it answers operators with fake tensors, and records their trace."""
