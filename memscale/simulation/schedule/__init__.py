"""When each operator and each copy of a simulated step runs: the clock that the engine's waits go by."""
