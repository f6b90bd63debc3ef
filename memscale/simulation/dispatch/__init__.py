"""What each operator of a step does to memory and to the clock: hollow tensors for answers, and books on them."""
