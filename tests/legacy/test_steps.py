"""Steps of optimizers are told to whoever listens, and garbage that goes meanwhile disturbs none."""

import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import memscale as ms

FORCE = ms.Config(force_optimize=True, enable_logging=False)


def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])


def stepped():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    parameter.sum().backward()
    optimizer.step()
    return parameter


def test_a_wrapped_model_may_be_collected_within_a_step():
    collecting = register_optimizer_step_post_hook(lambda *_: gc.collect())
    cycle = [ms.wrap(model(), FORCE)]
    cycle.append(cycle)
    del cycle
    try:
        assert stepped() < 1
    finally:
        collecting.remove()


@pytest.mark.parametrize("detached", [False, True])
def test_no_hook_stays_behind_the_last(detached):
    gc.collect()
    ms.detach(ms.wrap(model(), FORCE))  # with it goes what those that were collected left
    before = len(_global_optimizer_post_hooks)
    kept = [ms.wrap(model(), FORCE) for _ in range(2)]
    assert len(_global_optimizer_post_hooks) == before + 1
    if detached:
        for each in kept:
            ms.detach(each)
        assert len(_global_optimizer_post_hooks) == before
