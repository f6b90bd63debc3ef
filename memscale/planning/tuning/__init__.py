"""The best size of a batch and the plan that it needs: `AutoTuner`."""
