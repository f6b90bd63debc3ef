"""`tile`: runs a region on pieces of its input."""
