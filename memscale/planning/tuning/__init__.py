"""`AutoTuner`: finds the best size of a batch, and the plan for a step of that size."""
