"""The schedule of a simulated step: the times of operators and copies, by the clock of the offload engine."""
