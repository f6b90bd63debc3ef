"""A stack of layers whose parameters live on another tier, and how to look at it."""

from __future__ import annotations

import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, offload, policies
from memscale.runtime import Runtime, host_parameter_of
from tests.support.checking.checked_engine import CheckedRuntime
from tests.support.checks import bits
from tests.support.steps import RANDOM_STATE_BYTES

WIDTH, LAYERS, ROWS = 128, 4, 3
WEIGHT, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH
LAYER = WEIGHT + BIAS
# More than the activations of a step, and the states of the random generator that a checkpoint keeps.
SMALL = 8 * 4 * ROWS * WIDTH + 2 * RANDOM_STATE_BYTES
PARAMS = offload(what="params")


def runtime_of(depth=0, make=Runtime, **options):
    config = ms.AsyncOffloadConfig(**{"min_bytes": 0, "prefetch_depth": depth, **options})
    return make(config, disk_bytes=1 << 24)


def layers(count=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def rows():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def streamed(how=PARAMS, depth=0, model=None, plan=None, make=Runtime, **options):
    runtime = runtime_of(depth, make, **options)
    return ms.transform(layers() if model is None else model, plan or {"*": how}, runtime=runtime), runtime


def moved(runtime):
    """Bytes moved in and out so far, and alive on the tiers."""
    stats = runtime.stats()["cpu"]
    return tuple(sum(counter.values()) for counter in (stats.in_bytes, stats.out_bytes, stats.live_bytes))


def names_on_host(model):
    return [name for name, parameter in model.named_parameters() if host_parameter_of(parameter) is not None]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def trained(model, steps=1):
    for _ in range(steps):
        model(rows()).square().sum().backward()
    return bits(gradients(model))


HOWS = {
    "params": PARAMS,
    "params, checkpoint": compose(PARAMS, checkpoint()),
    "checkpoint, params": compose(checkpoint(), PARAMS),
    "params, dots": compose(PARAMS, checkpoint(policy=policies.dots_saveable)),
    "params, offload": compose(PARAMS, offload()),
    "offload, params": compose(offload(min_bytes=0), PARAMS),
    "params twice": compose(PARAMS, PARAMS),
}


def same(train, make=layers, plan=None, depth=2, **options):
    """`train` finds the same with a model as with the streamed one, and leaves the same behind; the latter."""
    plain = make()
    fit, _ = streamed(depth=depth, model=make(), plan=plan, make=CheckedRuntime, **options)
    assert bits(train(fit)) == bits(train(plain))
    assert bits(dict(fit.named_parameters())) == bits(dict(plain.named_parameters()))
    assert bits(gradients(fit)) == bits(gradients(plain))
    return fit


def loss_of(model):
    return model(rows()).square().sum()
