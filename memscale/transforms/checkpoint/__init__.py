"""`checkpoint`: keep a region's inputs, recompute the rest; and the policies that keep more."""
