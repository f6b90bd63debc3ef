"""An nn.Sequential in stretches: what each keeps is its input, what all compute is what they computed."""

import copy
import pickle

import pytest
import torch
from torch import nn

import memscale as ms

CUTS = (1, 5, 7)


def row():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(inplace=True),  # changes what a stretch is given
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 2),
    )


def step(model):
    torch.manual_seed(1)
    x = torch.rand(4, 3, 12, 12, requires_grad=True)
    y = model(x)
    y.square().mean().backward()
    gradients = [each.grad.clone() for each in (x, *model.parameters())]
    model.zero_grad(set_to_none=True)
    return [y.detach(), *gradients, *(each.clone() for each in model.buffers()), torch.get_rng_state()]


def assert_same(found, expected):
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("policy", [ms.policies.nothing_saveable, ms.policies.dots_saveable])
def test_stretches_compute_what_the_row_does(policy):
    model = row()
    fit = ms.transform(row(), {"": ms.checkpoint(policy=policy, cuts=CUTS)})
    for _ in range(2):  # the second time regions know themselves
        assert_same(step(fit), step(model))
    for other in (copy.deepcopy(fit), pickle.loads(pickle.dumps(fit))):
        assert_same(step(other), step(copy.deepcopy(model)))


def test_behind_a_cut_its_layers_output_is_kept_and_nothing_else():
    torch.manual_seed(0)
    layers = nn.Sequential(*[each() for _ in range(3) for each in (lambda: nn.Linear(8, 8), nn.Tanh, nn.Sigmoid)])
    x = torch.ones(4, 8)

    def kept(model):
        return sum(each.nbytes for each in ms.saved_residuals(model, x) if each.source == "intermediate")

    one = 4 * 8 * 4
    assert kept(layers) == 6 * one
    fit = ms.transform(layers, {"": ms.checkpoint(cuts=(1, 4, 7))})
    assert kept(fit) == 4 * one  # the outputs of three layers, and behind the last cut what two operators keep


def test_transforms_of_functions_go_through_stretches():
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fit, x = ms.transform(layers, {"": ms.checkpoint(cuts=(1,))}), torch.rand(5, 3)
    fn, state = ms.functional(fit)
    own, own_state = ms.functional(layers)
    found = torch.func.grad(lambda state: fn(state, x).square().sum())(state)
    expected = torch.func.grad(lambda state: own(state, x).square().sum())(own_state)
    assert_same(found.values(), expected.values())


def test_what_cannot_be_cut_is_told_before_it_runs():
    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    for cuts in ((0,), (2, 1), (1, 1), (True,), 3, "12"):
        with pytest.raises(ms.ConfigError, match="increasing ints"):
            ms.checkpoint(cuts=cuts)
    layers = [nn.Linear(3, 3), nn.Tanh()]
    for module, how, reason in (
        (nn.Linear(3, 3), ms.checkpoint(cuts=(1,)), r"for an nn\.Sequential"),
        (Own(*layers), ms.checkpoint(cuts=(1,)), r"for an nn\.Sequential"),
        (nn.Sequential(*layers), ms.compose(ms.checkpoint(cuts=(1,)), ms.tile(chunks=2)), "nothing around it"),
        (nn.Sequential(*layers), ms.checkpoint(cuts=(1, 2)), "has 2 children, from 0 to 1"),
    ):
        with pytest.raises(ms.TransformError, match=reason):
            ms.transform(nn.ModuleDict({"a": module}), {"a": how})


@pytest.mark.deep
def test_a_compiler_sees_one_region():
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fit, x = ms.transform(layers, {"": ms.checkpoint(cuts=(1,))}), torch.rand(5, 3)
    torch.compile(fit, backend="aot_eager", fullgraph=True)(x).sum().backward()
    found = [each.grad for each in layers.parameters()]
    layers.zero_grad()
    layers(x).sum().backward()
    assert_same(found, [each.grad for each in layers.parameters()])
