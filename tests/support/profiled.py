"""The steps that the tests of `profile` simulate and run: small models, trained for real and simulated."""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.support.steps import Training, mean

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


ROWS = 333  # many more than there are features, so that the peak is among the activations


def x(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def mlp(width=48, out=20, act=nn.GELU):
    return nn.Sequential(nn.Linear(width, 3 * width), act(), nn.Linear(3 * width, out))


def train(model, batch, optimizer=adamw, loss=mean, **options):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model, batch, optimizer and optimizer(parameters), loss, **options)


class Cases(dict):
    """Functions that make a training, by name, and the decorators that put them there."""

    def case(self, make):
        self[make.__name__.strip("_")] = make
        return make

    def forward_case(self, training):
        """Of a function that is the forward of a model; `training` makes the training of it."""

        def register(forward):
            self[forward.__name__] = functools.partial(training, forward)
            return forward

        return register


class Forward(nn.Module):
    """A model whose forward is a function of it and its arguments; `parts` are its children."""

    def __init__(self, forward, **parts):
        super().__init__()
        self._call = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self._call(self, *args, **kwargs)
