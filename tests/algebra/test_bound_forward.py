"""The forward of a region is a bound method with the module's signature to those who look, as accelerate does."""

import copy
import inspect
import pickle
import types
import typing

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import cast, checkpoint, compose, offload, tile
from tests.support.checks import bits

HOWS = {
    "checkpoint": checkpoint(),
    "offload": offload(tier="disk", min_bytes=0),
    "offload of parameters": offload(what="params", tier="disk", min_bytes=0),
    "tile": tile(chunks=2),
    "cast": cast(),
    "a composition": compose(cast(), checkpoint()),
}
PLANS = {"the root": ("",), "blocks": ("blocks.*",), "both": ("", "blocks.*")}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """One block."""
        return torch.tanh(self.linear(hidden)) * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: torch.Tensor, *, labels: torch.Tensor | None = None, **others: int) -> torch.Tensor:
        """The model."""
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return hidden if labels is None else (hidden - labels).square().mean()


def model():
    torch.manual_seed(0)
    return Model()


def transformed(how, paths):
    plain = model()
    return plain, ms.transform(plain, dict.fromkeys(paths, HOWS[how]))


def numbers():
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def gradients(of):
    for parameter in of.parameters():
        parameter.grad = None
    x = numbers().requires_grad_(True)
    y = of(x)
    y.square().sum().backward()
    return bits([y, x.grad, *[parameter.grad for parameter in of.parameters()]])


def regions(fit, paths):
    return [fit] if paths == ("",) else list(fit.blocks)


@pytest.mark.parametrize("paths", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("how", HOWS)
def test_it_is_a_method_of_its_module(how, paths):
    plain, fit = transformed(how, paths)
    for region in regions(fit, paths):
        original = type(region).forward
        assert inspect.ismethod(region.forward)
        assert region.forward.__self__ is region
        assert inspect.isfunction(region.forward.__func__)
        assert not hasattr(region.forward, "__wrapped__")
        assert region.forward.__name__ == "forward"
        assert region.forward.__qualname__ == original.__qualname__
        assert region.forward.__func__.__doc__ == original.__doc__
        assert typing.get_type_hints(region.forward) == typing.get_type_hints(original)
    assert inspect.signature(fit.forward) == inspect.signature(plain.forward)
    assert inspect.signature(fit.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    # As Hugging Face's Trainer finds the columns of a data set that the model takes.
    assert list(inspect.signature(fit.forward).parameters) == ["hidden", "labels", "others"]


@pytest.mark.parametrize("paths", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("how", HOWS)
def test_its_function_runs_as_the_forward_of_any_copy_of_the_module(how, paths):
    _, fit = transformed(how, paths)
    expected = gradients(fit)
    wrapped = copy.copy(fit)  # as accelerate copies a model
    for name, value in list(wrapped.__dict__.items()):
        if hasattr(value, "__func__") and value.__self__ is fit:
            wrapped.__dict__[name] = types.MethodType(value.__func__, wrapped)
    assert type(wrapped.__dict__["forward"]) is types.MethodType
    assert gradients(wrapped) == expected
    other = copy.deepcopy(fit)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    wrapped.__dict__["_modules"] = other._modules
    assert gradients(wrapped) == gradients(other) != expected
    assert gradients(fit) == expected


@pytest.mark.parametrize("how", HOWS)
def test_copies_and_pickles_have_methods_of_their_own(how):
    _, fit = transformed(how, ("", "blocks.*"))
    expected = gradients(fit)
    for other in (copy.deepcopy(fit), pickle.loads(pickle.dumps(fit))):
        for region, own in zip([other, *other.blocks], [fit, *fit.blocks], strict=True):
            assert inspect.ismethod(region.forward)
            assert region.forward.__self__ is region
            assert inspect.signature(region.forward) == inspect.signature(own.forward)
        assert gradients(other) == expected


def test_a_forward_that_somebody_patched_has_its_own_signature():
    plain = Block()
    plain.forward = lambda hidden, times=2: torch.sin(plain.linear(hidden)) * times
    fit = ms.transform(plain, {"": checkpoint()})
    assert list(inspect.signature(fit.forward).parameters) == ["hidden", "times"]
    assert bits([fit(numbers(), times=3)]) == bits([plain(numbers(), times=3)])


@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate", reason="accelerate, of the extra memscale[hf], is not installed")


# Of the compiler, which reads `.grad` of what it traces; PyTorch says it once in a process.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "paths",
    [pytest.param(paths, id=name, marks=[pytest.mark.deep] * (name != "both")) for name, paths in PLANS.items()],
)
def test_accelerate_compiles_the_blocks(accelerate, paths):
    from accelerate.utils import compile_regions

    plain, fit = transformed("checkpoint", paths)
    expected = gradients(fit)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    counts = []
    for model in (plain, fit):
        graphs.clear()
        torch._dynamo.reset()
        try:
            assert gradients(compile_regions(model, backend=backend)) == expected
            counts.append(len(graphs))
        finally:
            torch._dynamo.reset()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("paths", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("how", ["checkpoint", "offload"])
def test_accelerate_prepares_a_model_and_gives_it_back(accelerate, how, paths):
    _, fit = transformed(how, paths)
    expected = gradients(fit)
    accelerate.state.AcceleratorState._reset_state(True)  # which the Trainers of other files have set
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(fit)
    assert gradients(prepared) != expected
    again = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert again is fit
    assert inspect.ismethod(again.forward)
    assert gradients(again) == expected
