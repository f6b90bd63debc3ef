"""`offload()` under `torch.func`: refused by name, whatever the transform, unless nothing is left to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import memscale as ms
from tests.support.checks import bits

WAYS = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x),
    "jacrev": jacrev,
    "vmap": vmap,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "jacfwd": jacfwd,
    "grad of grad": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum()),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum())),
}
MOVING = {
    "alone": ms.offload(min_bytes=0),
    "around a checkpoint": ms.compose(ms.offload(min_bytes=0), ms.checkpoint()),
    "around a policy": ms.compose(ms.offload(min_bytes=0), ms.checkpoint(policy=ms.policies.dots_saveable)),
}


def region(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).exp()


# Forward mode compiles its rules at first use, with a function that PyTorch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", MOVING.values(), ids=MOVING)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_transform_is_refused_by_name(way: Any, how: Any) -> None:
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    with pytest.raises(ms.TransformError, match=r"offload\(min_bytes=0\) inside a transform of torch\.func"):
        way(how(region))(x)
    x.requires_grad_()
    how(region)(x).sum().backward()  # nothing of the refusal stays behind
    assert x.grad is not None


@pytest.mark.parametrize("way", [WAYS["grad"], WAYS["vmap"]], ids=["grad", "vmap"])
def test_a_module_in_a_plan_is_refused_too(way: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    fit = ms.transform(model, {"0": ms.offload(), "2": ms.checkpoint()})
    with pytest.raises(ms.TransformError, match=r"use checkpoint\(\) there"):
        way(lambda x: functional_call(fit, dict(fit.named_parameters()), (x,)))(torch.ones(2, 3))


def test_tangents_from_outside_are_refused() -> None:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(ms.TransformError, match=r"offload\(\) inside a transform of torch\.func"):
            grad(lambda x: ms.offload()(region)(x).sum())(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", [WAYS[name] for name in ("grad", "vmap of grad", "jacrev", "jvp")])
def test_a_region_inside_a_checkpoint_has_nothing_to_move(way: Any) -> None:
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    assert bits(way(ms.compose(ms.checkpoint(), ms.offload(min_bytes=0))(region))(x)) == bits(way(region)(x))


def test_a_transform_that_is_compiled_around_a_region():
    fit = ms.offload(min_bytes=0)(lambda x: x.sin() * x)
    x = torch.randn(3)

    def slope(x):
        return torch.func.vjp(lambda x: fit(x * 2).sum(), x)[1](torch.ones(()))[0]

    expected = torch.func.vjp(lambda x: ((x * 2).sin() * (x * 2)).sum(), x)[1](torch.ones(()))[0]
    assert torch.equal(torch.compile(slope, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo's own look at tensors, in PyTorch 2.10
def test_a_transform_that_is_compiled_around_streamed_parameters():
    fit = ms.transform(torch.nn.Linear(3, 2), {"": ms.offload(what="params", min_bytes=0)})
    x = torch.randn(3)

    def slope(x):
        return torch.func.vjp(lambda x: fit(x * 2).sum(), x)[1](torch.ones(()))[0]

    assert torch.equal(torch.compile(slope, backend="eager")(x), slope(x))
