"""`cast` in a compiled graph: no change of a copy is lost, and a tied weight is cast once, as outside of one."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale as ms
from memscale.core import internals
from tests.support.checks import bits


def under_no_grad(weight):
    with torch.no_grad():
        weight.mul_(0.5)


def by_data(weight):
    weight.data.mul_(0.5)


def by_a_view_of_data(weight):
    weight.data[0].zero_()


def detached(weight):
    weight.detach().mul_(0.5)


def in_a_checkpoint(weight):
    checkpoint(lambda: weight.data.mul_(0.5).sum(), use_reentrant=False)


QUICK = [by_a_view_of_data, in_a_checkpoint]  # the compiler takes half a second for each
CHANGES = [under_no_grad, by_data, by_a_view_of_data, detached, in_a_checkpoint]


class Changing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x):
        self.change(self.linear.weight)
        return self.linear(x)


REGIONS = {
    "module": lambda model: ms.transform(model, {"": ms.cast()}),
    "in checkpoint": lambda model: ms.transform(model, {"": ms.compose(ms.checkpoint(), ms.cast())}),
}


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize(
    ("region", "change"),
    [
        *(pytest.param("module", change, marks=() if change in QUICK else pytest.mark.deep) for change in CHANGES),
        pytest.param("in checkpoint", by_data, marks=pytest.mark.deep),
    ],
)
def test_a_change_of_a_copy_is_not_compiled(region, change):
    torch._dynamo.reset()
    model = Changing(change)
    before, fit = model.linear.weight.detach().clone(), REGIONS[region](model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cast\(\) under torch.compile: .*goes to a copy.*keep="):
        torch.compile(fit, backend="aot_eager", fullgraph=True)(torch.randn(2, 4))
    assert torch.equal(model.linear.weight, before)


@pytest.mark.usefixtures("cast_in_one_graph")
def test_an_argument_that_the_region_changes():
    torch._dynamo.reset()
    region = ms.cast()(lambda x: x.mul_(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="buffer or argument in place"):
        torch.compile(region, backend="aot_eager", fullgraph=True)(torch.randn(2, 4))


def reading(weight):
    assert weight.data[0].norm().shape == ()


def of_its_own(weight):
    (2 * weight.detach()).mul_(0.5)


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize(
    ("harmless", "grad"),
    [
        (reading, torch.enable_grad),
        pytest.param(of_its_own, torch.no_grad, marks=pytest.mark.deep),
        pytest.param(reading, torch.inference_mode, marks=pytest.mark.deep),
        pytest.param(of_its_own, torch.enable_grad, marks=pytest.mark.deep),
        pytest.param(reading, torch.no_grad, marks=pytest.mark.deep),
        pytest.param(of_its_own, torch.inference_mode, marks=pytest.mark.deep),
    ],
)
def test_what_changes_no_copy_is_compiled(harmless, grad):
    torch._dynamo.reset()
    fit, x = ms.transform(Changing(harmless), {"": ms.cast()}), torch.randn(2, 4)
    with grad():
        assert torch.equal(torch.compile(fit, backend="aot_eager", fullgraph=True)(x), fit(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x):
        return self.up(torch.tanh(self.down(x)))


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize("region", [pytest.param("module", marks=pytest.mark.deep), "in checkpoint"])
def test_the_gradient_of_a_tied_weight_is_added_up_in_the_same_dtype(region):
    """Cast twice, as it once was, the two parts of the gradient were added in float32 and not in bfloat16."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(16, 8)
    fit = REGIONS[region](model)
    [expected] = torch.autograd.grad(fit(x).square().sum(), [model.down.weight])
    traced = torch.compile(fit, backend="aot_eager", fullgraph=True)
    [grad] = torch.autograd.grad(traced(x).square().sum(), [model.down.weight])
    assert bits(grad) == bits(expected)


@pytest.mark.usefixtures("cast_in_one_graph")
def test_per_sample_gradients_of_a_region():
    torch._dynamo.reset()
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    fn, state = ms.functional(ms.transform(model, {"": ms.cast()}))
    state = {name: tensor.detach() for name, tensor in state.items()}

    def gradients(state, x):
        return torch.func.vmap(torch.func.grad(lambda s, x: fn(s, x).square().sum()), in_dims=(None, 0))(state, x)

    traced = torch.compile(gradients, backend="aot_eager", fullgraph=True)(state, x)
    assert {name: bits(value) for name, value in traced.items()} == {
        name: bits(value) for name, value in gradients(state, x).items()
    }


class Replacing(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4, dtype=dtype))

    def forward(self, x):
        self.count = self.count + 1
        return self.linear(x) * self.count


class ReplacingEntry(Replacing):
    def forward(self, x):
        self._buffers["count"] = self.count + 1
        return self.linear(x) * self.count


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize("kind", [Replacing, pytest.param(ReplacingEntry, marks=pytest.mark.deep)])
def test_a_cast_buffer_that_the_region_replaces_in_evaluation(kind):
    torch._dynamo.reset()
    model = kind(torch.float32).eval()
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        torch.compile(REGIONS["module"](model), backend="aot_eager", fullgraph=True)(torch.randn(2, 4))
    assert "a parameter, buffer or argument" in str(refused.value) + str(refused.value.__cause__)
    assert not model.count.any()


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize("kind", [Replacing, pytest.param(ReplacingEntry, marks=pytest.mark.deep)])
def test_a_buffer_of_integers_is_the_regions_to_replace(kind):
    torch._dynamo.reset()
    model, x = kind(torch.int64).eval(), torch.randn(2, 4)
    fit = REGIONS["module"](model)
    y = torch.compile(fit, backend="aot_eager", fullgraph=True)(x)
    assert fit.count.tolist() == [1] * 4
    fit.count.zero_()
    assert torch.equal(y, fit(x))


@pytest.mark.parametrize("region", ["module", pytest.param("in checkpoint", marks=pytest.mark.deep)])
def test_where_the_compiler_lists_no_attributes(region, monkeypatch):
    """As Dynamo before torch 2.12: `fullgraph` says so, and without it the region runs as Python, to the same bits."""
    torch._dynamo.reset()
    monkeypatch.setattr(internals, "TORCH_VERSION", (2, 11))
    model, x = Tied(), torch.randn(2, 8)
    fit = REGIONS[region](model)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"cast\(\) under torch.compile: torch 2.* from torch 2.12 on"
    ):
        torch.compile(fit, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    assert bits(torch.compile(fit, backend="aot_eager")(x)) == bits(fit(x))


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute")  # of Dynamo, about the copies of weights
def test_a_compiled_child_of_a_region_stays_compiled():
    """PyTorch never compiles code that first ran under a mode which wants to see the operators."""
    torch._dynamo.reset()
    compiled = []
    child = torch.compile(nn.Linear(4, 4), backend=lambda graph, _: compiled.append(graph) or graph)
    fit = ms.transform(nn.Sequential(nn.Linear(4, 4), child), {"": ms.cast()})
    for _ in range(2):
        fit(torch.randn(2, 4)).sum().backward()
    assert len(compiled) == 1
