"""A recompute is given the tensors of the forward: class, attributes, identity and graph are as then."""

import types

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, offload, policies, transform
from tests.support.checks import bits

HOW = {
    "checkpoint": checkpoint(),
    "nested": ms.compose(checkpoint(), checkpoint()),
    "offload around": ms.compose(offload(min_bytes=0), checkpoint()),
    "dots": checkpoint(policy=policies.dots_saveable),
}
CAPTURED = torch.linspace(1, 2, 6)
TRAINED = nn.Parameter(torch.linspace(1, 2, 6))


class Scaled(torch.Tensor):
    pass


def values():
    return torch.linspace(1, 2, 6)


def with_scale(tensor):
    tensor.scale = 3.0
    return tensor


def by_scale(x, t):
    return torch.sin(x * getattr(t, "scale", 1.0)) * t


def by(question):
    return lambda x, t: torch.sin(x * (3.0 if question(x, t) else 1.0)) * t


def in_place(x, t):
    scale = getattr(t, "scale", 1.0)
    t.mul_(1.5)
    return torch.sin(x * scale) * t.clone()


CASES = {
    "an attribute": (by_scale, lambda: with_scale(values())),
    "in a list": (lambda x, given: by_scale(x, given[0]), lambda: [with_scale(values())]),
    "in a dictionary": (lambda x, given: by_scale(x, given["a"]), lambda: {"a": with_scale(values())}),
    "in an object": (lambda x, o: by_scale(x, o.a), lambda: types.SimpleNamespace(a=with_scale(values()))),
    "an attribute of a result": (by_scale, lambda: with_scale(values().requires_grad_() * 2)),
    "an attribute of a subclass": (
        lambda x, t: by_scale(x, t).as_subclass(torch.Tensor),
        lambda: with_scale(values().as_subclass(Scaled)),
    ),
    "an attribute of what is changed in place": (in_place, lambda: with_scale(values())),
    "a parameter": (by(lambda x, t: isinstance(t, nn.Parameter)), lambda: nn.Parameter(values())),
    "a leaf": (by(lambda x, t: t.is_leaf), lambda: values().requires_grad_()),
    "a result": (by(lambda x, t: not x.is_leaf), values),
    "a captured tensor": (by(lambda x, t: t is CAPTURED), lambda: CAPTURED),
    "a captured parameter": (by(lambda x, t: t is TRAINED), lambda: TRAINED),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_without_checkpoint(case, how):
    region, make = case

    def gradient(how):
        x, fn = torch.linspace(-1, 1, 6, requires_grad=True), how(region)
        return [torch.autograd.grad(fn(x * 1.0, make()).sum(), x)[0] for _ in range(2)]

    for found, expected in zip(gradient(how), gradient(ms.identity), strict=True):
        assert torch.equal(found, expected)


def test_an_attribute_that_changes_before_backward_is_as_in_the_forward():
    x, t = torch.linspace(-1, 1, 6, requires_grad=True), with_scale(values())
    y = checkpoint()(by_scale)(x, t).sum()
    t.scale = 5.0
    (gradient,) = torch.autograd.grad(y, x)
    assert torch.equal(gradient, torch.cos(x * 3.0) * t * 3.0)
    assert t.scale == 5.0


def test_a_backward_inside_adds_to_the_gradient_of_an_argument_once():
    def region(x, w):
        (x * w).sin().sum().backward(inputs=[w], retain_graph=True)
        return (x * w).cos()

    def gradient(how):
        x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        how(region)(x, w).sum().backward()
        return torch.stack([x.grad, w.grad])

    assert torch.equal(gradient(checkpoint()), gradient(ms.identity))


# -------------------------------------------------------------------------------------------- the layout of the forward

VIEWS = {
    "a slice of the sequence": lambda h: h[:, 1:3],
    "every other": lambda h: h[:, ::2],
    "transposed": lambda h: h.transpose(1, 2),
    "permuted": lambda h: h.permute(2, 0, 1),
    "expanded": lambda h: h[:1].expand(3, *h.shape[1:]),
    "one row": lambda h: h.narrow(0, 0, 1),
    "half of the width": lambda h: h.chunk(2, 2)[1],
    "one of the sequence": lambda h: h.unbind(1)[1],
    "one more dimension": lambda h: h.unsqueeze(0),
    "channels last": lambda h: h.unflatten(1, (2, -1)).contiguous(memory_format=torch.channels_last),
    "overlapping": lambda h: h.as_strided((2, 4), (1, 2), 1),
}
AROUND = [
    checkpoint(),
    checkpoint(policy=policies.everything_saveable),
    offload(min_bytes=0),
    compose(offload(min_bytes=0), checkpoint()),
]


class ByLayout(nn.Module):
    """Its values depend on the layout of its argument."""

    def forward(self, x):
        by_strides = sum(at * stride % 97 for at, stride in enumerate(x.stride(), 1))
        format_counts = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return torch.sin(x * (1 + by_strides + x.storage_offset() + x.is_contiguous() / 2 + format_counts / 4))


class Viewed(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.first, self.view, self.inner = nn.Linear(6, 6), view, nn.Sequential(ByLayout(), ByLayout())

    def forward(self, x):
        return self.inner(self.view(self.first(x)))


@pytest.mark.parametrize("around", AROUND, ids=repr)
@pytest.mark.parametrize("view", VIEWS)
def test_a_recompute_inside_another_region_sees_the_layout_of_the_forward(view, around):
    torch.manual_seed(0)
    model, x = Viewed(VIEWS[view]), torch.randn(1, 8, 6)

    def gradients(run):
        given = x.clone().requires_grad_()
        return torch.autograd.grad(run(given).square().sum(), [given, *model.parameters()])

    rules = [("inner.*", checkpoint()), ("inner", around), ("", checkpoint())]
    assert bits(gradients(transform(model, rules))) == bits(gradients(model))
