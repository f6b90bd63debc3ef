"""`offload`: keeps the tensors that a region saves for backward, or its parameters, on another tier."""
