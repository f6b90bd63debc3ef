"""What a plan decides about: the parts of a model, found by its structure, and what may be done to each."""
