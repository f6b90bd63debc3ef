"""An nn.Sequential cut into segments: each keeps its input, and the numbers are those of the whole."""

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
        nn.ReLU(inplace=True),  # changes the input of a segment
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 36, 2),
    )


def rows_in_a_row():
    """The same layers, in rows of their own; the last of them is of a class that says nothing new."""
    layers = list(row())
    own = type("Own", (nn.Sequential,), {})
    return nn.Sequential(
        nn.Sequential(*layers[:3]),
        layers[3],
        nn.Sequential(nn.Sequential(*layers[4:6]), *layers[6:9]),
        own(*layers[9:]),
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
def test_segments_compute_what_the_row_does(policy):
    model = row()
    fit = ms.transform(row(), {"": ms.checkpoint(policy=policy, cuts=CUTS)})
    for _ in range(2):  # the second time regions know themselves
        assert_same(step(fit), step(model))
    for other in (copy.deepcopy(fit), pickle.loads(pickle.dumps(fit))):
        assert_same(step(other), step(copy.deepcopy(model)))


@pytest.mark.parametrize("cuts", [((0, 1), (2, 1), (2, 2)), (1, (2, 0, 1), (3, 1))])
def test_a_segment_begins_in_one_row_and_ends_in_the_next(cuts):
    model = rows_in_a_row()
    fit = ms.transform(rows_in_a_row(), {"": ms.checkpoint(cuts=cuts)})
    assert fit.state_dict().keys() == model.state_dict().keys()
    for _ in range(2):
        assert_same(step(fit), step(model))
    assert ms.Plan.from_json(ms.Plan({"": ms.checkpoint(cuts=cuts)}).to_json()) == ms.Plan(
        {"": ms.checkpoint(cuts=cuts)}
    )


def test_what_runs_around_the_children_of_a_row_is_not_passed_over():
    fit = ms.transform(rows_in_a_row(), {"": ms.checkpoint(cuts=((0, 1),))})
    handle = fit[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ms.TransformError, match="cuts through child 0, a Sequential"):
        step(fit)
    handle.remove()
    assert_same(step(fit), step(rows_in_a_row()))
    for plan in ({"0": ms.checkpoint(), "": ms.checkpoint(cuts=((0, 1),))}, {"": ms.checkpoint(cuts=((1, 1),))}):
        with pytest.raises(ms.TransformError, match="cuts through child"):
            step(ms.transform(rows_in_a_row(), plan))


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


def test_transforms_of_functions_go_through_segments():
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

    for cuts in ((0,), (2, 1), (1, 1), (True,), 3, "12", ((1,),), ((1, 0),), ((-1, 1),), ((1, 2), 1), ((0, True),)):
        with pytest.raises(ms.ConfigError, match="positions in increasing order"):
            ms.checkpoint(cuts=cuts)
    layers = [nn.Linear(3, 3), nn.Tanh()]
    for module, how, reason in (
        (nn.Linear(3, 3), ms.checkpoint(cuts=(1,)), r"for an nn\.Sequential"),
        (Own(*layers), ms.checkpoint(cuts=(1,)), r"for an nn\.Sequential"),
        (nn.Sequential(*layers), ms.compose(ms.checkpoint(cuts=(1,)), ms.tile(chunks=2)), "nothing around it"),
        (nn.Sequential(*layers), ms.checkpoint(cuts=(1, 2)), "has 2 children, from 0 to 1"),
        (nn.Sequential(nn.Sequential(*layers)), ms.checkpoint(cuts=((0, 2),)), "child 0 of it has 2 children"),
    ):
        with pytest.raises(ms.TransformError, match=reason):
            ms.transform(nn.ModuleDict({"a": module}), {"a": how})


def test_a_compiler_recomputes_each_segment():
    rows = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(3)]
    layers, x = nn.Sequential(*rows), torch.rand(64, 8)
    how = ms.checkpoint(cuts=((0, 1), (1, 1), (2, 1)))
    found, kept = [], []
    for model in (layers, ms.transform(layers, {"": how}), how(layers.forward)):
        torch._dynamo.reset()
        output = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        kept.append(
            sum(each.nbytes for each in output.grad_fn.saved_tensors if each.numel() > layers[0][0].weight.numel())
        )
        output.sum().backward()
        found.append([each.grad for each in layers.parameters()])
        layers.zero_grad()
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    # Two results of Linear in place of four of Tanh; the input, and what is behind the last cut, are kept by both.
    assert [kept[0] - each for each in kept[1:]] == [2 * 64 * 8 * 4] * 2
