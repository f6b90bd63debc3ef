"""What a recompute makes is gone after backward, also what nothing asked for."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import memscale as ms
from memscale.transforms.tile.head.loss import without_hooks

RESULTS = {"exp": torch.exp, "tanh": torch.tanh, "softmax": lambda x: x.softmax(-1), "norm": lambda x: x.norm(dim=-2)}


def tensors_with(numbers):
    gc.collect()
    return sum(type(each) is torch.Tensor and each.shape[-1:] == (numbers,) for each in gc.get_objects())


@pytest.mark.parametrize("saves", RESULTS.values(), ids=RESULTS)
def test_a_result_that_goes_nowhere_and_that_its_operator_saves(saves):
    def region(x):
        y = x.sin()
        saves(y)  # its operator is gone before backward, and comes again in the recompute
        return y * y.cos()

    x = torch.ones(3, 4321, requires_grad=True)
    ms.checkpoint()(region)(x).sum().backward()
    wanted = torch.autograd.grad(region(x).sum(), x)[0]
    assert torch.equal(x.grad, wanted)
    assert tensors_with(4321) == 3


def test_what_an_operator_returns_beside_its_output_goes_with_it():
    """A policy's recorder kept it until another output came to the same address: a step held other bytes each time."""
    gone = []

    def region(x):
        out, mean, _ = torch.native_layer_norm(x, (64,), None, None, 1e-5)
        extra = weakref.ref(mean.untyped_storage())
        del mean, _
        out = out * 2
        gone.append(extra() is None)
        return out

    ms.checkpoint(policy=ms.policies.dots_saveable)(region)(torch.randn(8, 64, requires_grad=True))
    assert gone[0]


def test_nor_where_hooks_only_look():
    x = torch.ones(4322, requires_grad=True)
    assert len(ms.saved_residuals(torch.exp, x)) == 1
    with without_hooks():
        x.exp()
    assert tensors_with(4322) == 1


def test_a_class_that_is_made_for_one_module_goes_with_it():
    """`parametrize` makes one, with a property that refers to the module; what is remembered of classes kept it."""

    def trained():
        class Slotted:
            __slots__ = ("scale",)

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.slotted = weight_norm(nn.Linear(2, 2)), Slotted()
                self.slotted.scale, self.calls = 2, 0

            def forward(self, x):
                self.calls += 1
                return self.linear(x).tanh() * self.slotted.scale

        model = Scaled()
        ms.transform(model, {"": ms.checkpoint()})(torch.ones(1, 2)).sum().backward()
        return [weakref.ref(each) for each in (model, model.linear, type(model.linear), Scaled, Slotted)]

    gone = trained()
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_replaced_parameters_and_deleted_modules_are_gone_after_the_next_call(grad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    fit = ms.transform(model, {"1": ms.checkpoint()})
    del model
    for _ in range(2):
        fit(torch.ones(2, 4)).sum().backward()
    former = [weakref.ref(each) for each in (*fit[1].parameters(), fit[1][1])]
    del fit[1][1]
    fit.load_state_dict({name: each.clone() for name, each in fit.state_dict().items()}, assign=True)
    with torch.set_grad_enabled(grad):
        fit(torch.ones(2, 4))
    gc.collect()
    assert [each() for each in former] == [None] * 5
