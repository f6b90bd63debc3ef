"""The schedule of a simulated step: the times of operators and copies, by the clock that the engine waits on."""
