"""What a function keeps for backward, and whether a transform changed the numbers."""
