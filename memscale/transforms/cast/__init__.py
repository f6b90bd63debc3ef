"""`cast`: mixed precision as a function of the state."""
