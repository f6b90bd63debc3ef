"""What is known of PyTorch's operators: one rule each, by families."""
