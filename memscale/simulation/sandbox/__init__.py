"""The world of a simulated step: what it may touch and see of the process, and how each is put back."""
