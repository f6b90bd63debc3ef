"""What may be process-wide around a forward and not around its backward, and a parametrization that can be cached."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight.triu() + weight.triu(1).T).tanh()


@contextmanager
def doubles_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
