"""What each operator of a step does to memory and to the clock: fake tensors for answers, and a trace of them."""
