"""The rules of PyTorch's operators: one `OpRule` each, a file for each family of operators."""
