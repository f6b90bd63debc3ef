"""offload(what="params") where something unusual happens: no memory, inference mode, other runtimes, shared memory."""

import itertools
import random

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, offload
from memscale.runtime import Runtime, host_parameter_of
from memscale.runtime.parameters.host_parameter import is_used
from tests.support.adversarial_device import AdversarialDevice
from tests.support.checks import bits
from tests.support.coverings import pairwise
from tests.support.layers import (
    LAYER,
    LAYERS,
    PARAMS,
    WEIGHT,
    WIDTH,
    layers,
    moved,
    names_on_host,
    rows,
    runtime_of,
    streamed,
    trained,
)


@pytest.mark.parametrize(
    ("how", "depth", "failing"),
    pairwise(itertools.product([PARAMS, compose(PARAMS, checkpoint())], [0, 2], range(1, 5))),
)
def test_a_step_without_memory_does_not_spoil_the_next(how, depth, failing):
    def train(model, fail):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        losses = []
        for step in range(4):
            if step == 1:
                fail()
            loss = model(rows()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return bits([losses, list(model.parameters())])

    model = nn.Sequential(layers(), layers())
    fit = ms.transform(model, {"*": how}, runtime=(runtime := runtime_of(depth)))

    def fail():
        backend = runtime.engine(torch.empty(0)).backend
        empty, asked = backend.empty, []

        def scarce(nbytes, like):
            asked.append(nbytes)
            if len(asked) >= failing:
                raise torch.OutOfMemoryError("there is no room")
            return empty(nbytes, like)

        backend.empty = scarce
        with pytest.raises(torch.OutOfMemoryError):
            fit(rows())
        backend.empty = empty

    torch.manual_seed(0)
    assert train(fit, fail) == train(nn.Sequential(layers(), layers()), lambda: None)
    assert not any(is_used(host_parameter_of(parameter)) for parameter in fit.parameters())


@pytest.mark.parametrize("how", [PARAMS, compose(PARAMS, checkpoint())], ids=repr)
def test_a_first_call_in_inference_mode(how):
    fit, plain = streamed(how)[0], layers()
    with torch.inference_mode():
        assert bits(fit(rows())) == bits(plain(rows()))
    assert len(names_on_host(fit)) == 2 * LAYERS
    assert not any(parameter.is_inference() for parameter in fit.parameters())
    assert trained(fit) == trained(plain)
    loss = fit(rows()).square().sum()
    with torch.no_grad():
        fit[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_region_without_gradients_takes_the_kernels_of_one_that_stays(mode):
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(3, 4, WIDTH).transpose(0, 1)
    fit = ms.transform(
        nn.Sequential(nn.Linear(WIDTH, WIDTH)), {"*": offload(what="params", min_bytes=0)}, runtime=runtime_of()
    )
    ran = []
    for each in (model, fit, fit):  # the first call is watched
        with mode(), torch.profiler.profile(acc_events=True) as profiler:
            each(x)
        # `linear` makes one matrix of the rows where a view of its weight requires gradients.
        ran.append({event.name for event in profiler.events()} & {"aten::mm", "aten::bmm"})
    assert ran == [{"aten::mm"}] * 3


def test_a_parameter_of_another_runtime_is_streamed_by_that_runtime():
    model = layers()
    _, first = streamed(model=model)
    fit, second = streamed(model=model)
    trained(ms.transform(model, {"*": PARAMS}, runtime=first))
    before = moved(first)[0]
    model.zero_grad()
    assert trained(fit) == trained(layers())
    # Backward needs no bias, and no weight of the first layer, whose input asks for no gradient.
    assert moved(first)[0] - before == LAYERS * LAYER + (LAYERS - 1) * WEIGHT
    assert second.stats() == {}


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return x + self.weight


def halve_gradient(x):
    x.grad.mul_(0.5)


def test_a_gradient_that_others_have_too_may_be_changed_in_place():
    """PyTorch gives both terms of a sum one gradient; a hook that clips or unscales changes it during backward."""

    def train(model):
        x = torch.ones(4, 4, requires_grad=True)
        x.register_post_accumulate_grad_hook(halve_gradient)
        before = model[0](torch.ones(4, 4))
        (model[1](x.view(16).view(4, 4)) * 3 + before).sum().backward()
        return bits([x.grad, *[parameter.grad for parameter in model.parameters()]])

    expected = train(nn.Sequential(Added(), Added()))
    for seed in range(20):
        backend = AdversarialDevice(random.Random(seed).randrange, {"pinned": 1 << 16})
        runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=2), backend=backend)
        fit = ms.transform(nn.Sequential(Added(), Added()), {"*": PARAMS}, runtime=runtime)
        assert train(fit) == expected, f"case {seed}"
