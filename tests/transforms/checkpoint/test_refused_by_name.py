"""What a region cannot be run again with is refused in forward, by its name; what looks like it and can, runs."""

import io
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import memscale as ms
from memscale.runtime import Runtime
from tests.support.checks import bits

CHECKPOINTS = [ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)]
TILE = ms.tile(chunks=2)


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        (lambda: (x for x in [torch.ones(2)] * 4), "generator"),
        (lambda: [iter([torch.ones(2)] * 4)], "list_iterator"),
        (lambda: {"steps": itertools.count()}, "count"),
        (lambda: io.StringIO("1\n2\n"), "StringIO"),
    ],
    ids=["generator", "iterator in a list", "iterator in a dictionary", "file"],
)
@pytest.mark.parametrize("how", [*CHECKPOINTS, TILE], ids=str)
def test_an_iterator_among_the_arguments(how, argument, kind):
    def region(x, given):
        raise AssertionError("it has begun to take items")

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ms.TransformError, match=rf"given an iterator, a {kind}.*give it a list"):
        how(region)(x, argument())
    if how is not TILE:
        with pytest.raises(ms.TransformError, match="given an iterator"):
            torch.func.grad(lambda x: how(region)(x, argument()))(x)


def test_an_iterator_with_attributes_of_its_own_is_an_object_like_any_other():
    class Countdown:
        def __init__(self):
            self.left = 3

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            return self.left

    def step(how):
        steps, x = Countdown(), torch.ones(2, requires_grad=True)
        how(lambda x, steps: torch.sin(x * next(steps)))(x, steps).sum().backward()
        return x.grad.tolist(), steps.left

    assert step(ms.checkpoint()) == step(ms.identity)


@pytest.mark.parametrize(
    "how", [*CHECKPOINTS, TILE, pytest.param(ms.offload(min_bytes=0).on(Runtime()), id="offload")], ids=str
)
def test_a_transform_of_torch_func_inside(how):
    def region(x):
        return torch.func.grad(lambda x: x.sin().sum())(x) * x

    with pytest.raises(ms.TransformError, match=r"uses a transform of torch\.func.*torch\.autograd\.grad"):
        how(region)(torch.ones(4, 2, requires_grad=True))


@pytest.mark.parametrize("how", [*CHECKPOINTS, TILE, ms.cast()], ids=str)
def test_a_module_of_torchscript(how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript warns of its own end
        scripted = torch.jit.script(nn.Linear(2, 2))
    region = nn.Sequential(nn.Linear(2, 2), scripted)
    with pytest.raises(ms.TransformError, match=r"a module of TorchScript, Linear, whose state lives in C\+\+"):
        how(region)(torch.ones(4, 2))
    assert {each.name for each in ms.saved_residuals(region, torch.ones(4, 2))} >= {"1.weight"}


@pytest.mark.parametrize("how", [*CHECKPOINTS, TILE], ids=str)
def test_tangents_of_forward_mode_are_those_without_it(how):
    """A rerun after the level is left has no tangents: the region runs as it is."""

    def step(how):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        with forward_ad.dual_level():
            out = how(model)(forward_ad.make_dual(torch.ones(4, 2), torch.full((4, 2), 0.5)))
            value, tangent = forward_ad.unpack_dual(out)
        tangent.square().sum().backward()
        return bits([value, tangent, *[p.grad for p in model.parameters()]])

    assert step(how) == step(ms.identity)


@pytest.mark.parametrize("how", [*CHECKPOINTS, TILE, ms.cast()], ids=str)
def test_a_lazy_module_that_was_added_later(how):
    fit = ms.transform(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), {"0": how})
    x = torch.ones(4, 4)
    fit(x)
    fit[0][1] = nn.LazyLinear(2)
    with pytest.raises(ms.TransformError, match=r"has a LazyLinear.*run a batch through that module first"):
        fit(x)
    fit[0][1](x)
    fit(x).sum().backward()
    assert fit[0][1].weight.grad.shape == (2, 4)


@pytest.mark.parametrize("what", ["activations", "params"])
def test_offload_runs_a_lazy_module_that_was_added_later(what):
    fit = ms.transform(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), {"0": ms.offload(what=what, min_bytes=0)}
    )
    fit[0][1] = nn.LazyLinear(2)
    fit(torch.ones(4, 4)).sum().backward()
    assert fit[0][1].weight.grad.shape == (2, 4)
