"""`OOMPredictor`: predicts whether a step fits, which changes make the step fit, and the largest batch that fits."""
