"""Hooks of modules inside a region that come or go between forward and backward: the recompute runs the forward's."""

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits, seed


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def after(change, how):
    """Gradients of a step around which `change` is run: up to its `yield` before the forward, then before backward."""
    seed()
    net = model()
    region, x = how(net), torch.ones(5, 3, requires_grad=True)
    around = change(net)
    next(around, None)
    y = region(x * 0.5)
    next(around, None)
    y.square().sum().backward()
    next(around, None)
    return bits([x.grad, *[p.grad for p in net.parameters()]])


def pre_hook_with_kwargs_removed(net):  # as PEFT's aLoRA does
    offsets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    handle = net[2].register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * offsets,), kwargs), with_kwargs=True)
    yield
    handle.remove()


def hook_added_first(net):
    net[0].register_forward_hook(lambda m, args, out: out * 2)
    yield
    net[0].register_forward_hook(lambda m, args, out: out + 5, prepend=True)


def hook_exchanged(net):
    handle = net[1].register_forward_hook(lambda m, args, out: out * 2)
    yield
    handle.remove()
    net[1].register_forward_hook(lambda m, args, out: out * 3)


def hook_that_removes_itself(net):
    def once(module, args):
        handle.remove()
        return (args[0] * 3,)

    handle = net[0].register_forward_pre_hook(once)
    yield


def backward_hook_added(net):
    yield
    net[0].register_full_backward_hook(lambda m, grads_in, grads_out: tuple(g * 7 for g in grads_in if g is not None))


@pytest.mark.parametrize(
    "change",
    [pre_hook_with_kwargs_removed, hook_added_first, hook_exchanged, hook_that_removes_itself, backward_hook_added],
)
def test_the_recompute_runs_the_hooks_of_the_forward(change):
    expected = after(change, ms.identity)
    assert after(change, ms.checkpoint()) == expected
    assert after(change, ms.compose(ms.checkpoint(), ms.checkpoint())) == expected


def test_hooks_are_those_of_the_present_after_backward():
    net = model()
    gone = net[0].register_forward_pre_hook(lambda m, args: (args[0] * 3,))
    y = ms.checkpoint()(net)(torch.ones(5, 3))
    gone.remove()
    stays = net[1].register_forward_hook(lambda m, args, out: out * 2)
    y.sum().backward()
    assert len(net[0]._forward_pre_hooks) == 0
    assert len(net[1]._forward_hooks) == 1
    stays.remove()
    assert len(net[1]._forward_hooks) == 0


def test_what_a_hook_collects_is_collected_once():
    net, collected = model(), []
    net[1].register_forward_hook(lambda m, args, out: collected.append(out))
    ms.checkpoint()(net)(torch.ones(5, 3)).sum().backward()
    assert len(collected) == 1
