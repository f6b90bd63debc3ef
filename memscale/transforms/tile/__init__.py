"""`tile`: a region in pieces of its input."""
