"""`offload`: what a region saves, or its parameters, wait on another tier."""
