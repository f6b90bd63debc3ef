"""The search for the fastest plan: choices of the solver for limits on a grid, and simulated steps of these choices."""
