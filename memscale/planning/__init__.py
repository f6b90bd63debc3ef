"""What would make a step fit: blocks, candidates, predictions."""
