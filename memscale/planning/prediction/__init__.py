"""Whether a step fits as it is, what would make it fit, and the largest that does: `OOMPredictor`."""
