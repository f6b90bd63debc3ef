"""A transformed or wrapped model holds no reference to itself: `del` frees its weights, without a collection."""

import copy
import pickle
import weakref

import pytest
import torch
import torch._dynamo  # PyTorch loads it in the first dispatch mode, and the failed imports of that hold the frames
from torch import nn

import memscale as ms
from memscale import cast, checkpoint, compose, identity, offload, policies, tile
from memscale.algebra.apply import install, uninstall
from tests.support.checks import bits

HOWS = {
    "checkpoint": checkpoint(),
    "checkpoint with a policy": checkpoint(policy=policies.dots_saveable),
    "offload": offload(tier="disk", min_bytes=0),
    "offload of parameters": offload(what="params", tier="disk", min_bytes=0),
    "tile": tile(chunks=2),
    "cast": cast(),
    "checkpoint of cast": compose(checkpoint(), cast()),
    "offload of checkpoint": compose(offload(tier="disk", min_bytes=0), checkpoint()),
    "checkpoint of offload": compose(checkpoint(), offload(tier="disk", min_bytes=0)),
    "tile of checkpoint": compose(tile(chunks=2), checkpoint()),
    "cast of tile": compose(cast(), tile(chunks=2)),
    "the parameters of checkpoint": compose(offload(what="params", tier="disk", min_bytes=0), checkpoint()),
}


pytestmark = pytest.mark.usefixtures("no_collection")


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(2)])


def watch(model):
    return [weakref.ref(each) for each in (*model.modules(), *model.parameters())]


def alive(watched):
    return [type(each()).__name__ for each in watched if each() is not None]


def step(model):
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_(True)
    model(x).square().sum().backward()
    return bits([x.grad])


@pytest.mark.parametrize("plan", [{"*": ...}, {"": ...}, {"": ..., "*": ...}], ids=["children", "root", "both"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_transformed_model_is_freed_by_del(how, plan, trained):
    model = layers()
    fit = ms.transform(model, dict.fromkeys(plan, HOWS[how]))
    if trained:
        step(fit)
    watched = watch(fit)
    del model, fit
    assert alive(watched) == []


@pytest.mark.parametrize("how", HOWS)
def test_a_graph_keeps_what_its_backward_needs_and_no_longer(how):
    model = layers()
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_(True)
    fit = ms.transform(model, {"": HOWS[how]})
    fit(x).square().sum().backward()
    expected, x.grad = bits([x.grad]), None
    watched = watch(fit)
    loss = fit(x).square().sum()
    del model, fit
    loss.backward()
    assert bits([x.grad]) == expected
    del loss
    assert alive(watched) == []


@pytest.mark.parametrize("how", HOWS)
def test_copies_and_what_was_installed_and_taken_off_are_freed_too(how):
    model = layers()
    before = install(model, {"*": HOWS[how]})
    expected = step(model)
    for make in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        other = make(model)
        assert step(other) == expected
        watched = watch(other)
        del other
        assert alive(watched) == []
    again = ms.transform(model, {"": HOWS[how]})
    step(again)
    del again
    uninstall(before)
    watched = watch(model)
    del model
    assert alive(watched) == []


@pytest.mark.parametrize("trained", [False, True])
def test_a_wrapped_model_is_freed_by_del(trained):
    model = ms.wrap(layers(), ms.Config(force_optimize=True, enable_logging=False))
    executor = model._memscale_executor
    assert executor.model is model
    assert executor.plan != ms.Plan()
    if trained:
        step(model)
    watched = watch(model)
    del model
    assert alive(watched) == []
    assert str(executor).startswith("Sequential on ")
    with pytest.raises(ms.TransformError, match="the model of this executor is gone"):
        executor.detach()


def test_a_model_that_was_wrapped_for_a_block_is_freed_after_it():
    model = layers()
    with ms.optimize(model, config=ms.Config(force_optimize=True, enable_logging=False)) as executor:
        step(model)
    watched = watch(model)
    del model, executor
    assert alive(watched) == []


def test_a_forward_of_which_the_module_is_gone_says_so():
    forward = ms.transform(layers(), {"": checkpoint()}).forward
    with pytest.raises(ms.TransformError, match="keep the module itself"):
        forward(torch.ones(2, 8))


def test_the_identity_leaves_nothing_to_watch():
    model = layers()
    watched = watch(model)
    fit = ms.transform(model, {"*": identity})
    del model
    assert len(alive(watched)) == len(list(fit.parameters()))
