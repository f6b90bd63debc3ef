"""`cast`: mixed precision as a pure function of the state."""
