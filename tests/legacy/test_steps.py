"""Steps of optimizers are told to whoever listens, and garbage that goes meanwhile disturbs none."""

import gc

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import memscale as ms
from tests.support import processes

FORCE = ms.Config(force_optimize=True, enable_logging=False)

# In a process of its own: a model that another test left wrapped keeps the hook that is counted here.
HOOKS = """
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import memscale as ms

def wrapped():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    return ms.wrap(model, ms.Config(force_optimize=True, enable_logging=False))

assert len(hooks) == 0, hooks
kept = [wrapped() for _ in range(2)]
assert len(hooks) == 1, hooks
ms.detach(kept.pop())
assert len(hooks) == 1, hooks
ms.detach(kept.pop())
assert len(hooks) == 0, hooks
"""


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


def test_all_wrapped_models_have_one_hook_and_none_stays_behind_the_last():
    done = processes.run(HOOKS)
    assert done.returncode == 0, done.stderr
