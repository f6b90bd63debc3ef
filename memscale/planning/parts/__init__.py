"""The parts of a model that a plan decides about, found by structure, and the candidates for each part."""
