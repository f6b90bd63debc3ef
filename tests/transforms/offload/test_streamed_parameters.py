"""offload(what="params"): what becomes of the parameters themselves, and which of them stay."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import identity
from memscale.runtime import Runtime
from memscale.simulation.measured.allocator_trace import measure
from tests.support.adversarial_device import AdversarialDevice
from tests.support.checks import bits, fingerprint
from tests.support.coverings import taking_turns
from tests.support.layers import (
    HOWS,
    LAYER,
    LAYERS,
    PARAMS,
    SMALL,
    WEIGHT,
    WIDTH,
    gradients,
    layers,
    moved,
    names_on_host,
    rows,
    runtime_of,
    streamed,
    trained,
)

# ------------------------------------------------------------------------------------------------- the parameters


def test_parameters_keep_their_identity_values_and_versions():
    model = layers()
    plain, before = copy.deepcopy(model), fingerprint(model)
    objects = dict(model.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in objects.items()}
    versions = {name: parameter._version for name, parameter in objects.items()}
    runtime = runtime_of()
    fit = ms.transform(model, {"*": PARAMS}, runtime=runtime)
    assert fingerprint(model) == before, "nothing moves before the first call"
    trained(fit)
    assert names_on_host(fit) == names_on_host(model) == list(objects)
    for name, parameter in fit.named_parameters():
        assert parameter is objects[name]
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.data_ptr() != addresses[name]
        assert parameter._version == versions[name]
        assert parameter.grad.device == parameter.device
    assert bits(fit.state_dict()) == bits(plain.state_dict())
    assert list(fit.state_dict()) == list(plain.state_dict())
    addresses = [parameter.data_ptr() for parameter in fit.parameters()]
    trained(fit)
    assert [parameter.data_ptr() for parameter in fit.parameters()] == addresses
    assert trained(model) == trained(plain, 3), "the argument trains as before"


def test_gradients_live_on_the_tier():
    fit, runtime = streamed()
    step = measure(lambda: trained(fit))
    assert step.end_bytes < SMALL
    assert moved(runtime)[2] == 2 * LAYERS * LAYER
    fit.zero_grad()
    assert moved(runtime)[2] == LAYERS * LAYER


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("graph", [False, True], ids=["", "with a graph"])
def test_memory_is_given_back_with_the_model(graph, depth):
    fit, runtime = streamed(depth=depth)
    trained(fit, 2)
    loss = fit(rows()).sum() if graph else None
    del fit
    gc.collect()
    if graph:
        assert moved(runtime)[2] >= LAYERS * WEIGHT
        loss.backward()
        del loss
    assert moved(runtime)[2] == 0


def test_a_model_that_is_gone_by_backward_leaves_its_weights_to_the_graph():
    x = rows().requires_grad_()
    model = layers().requires_grad_(False)
    expected = torch.autograd.grad(model(x).square().sum(), x)
    fit, runtime = streamed(model=model, depth=1)
    loss = fit(x).square().sum()
    del fit, model
    gc.collect()
    assert bits(torch.autograd.grad(loss, x)) == bits(expected)
    assert moved(runtime)[2] == 0


def stays(make, expected, plan=None):
    fit, _ = streamed(model=make(), plan=plan)
    assert trained(fit, 2) == trained(make(), 2)
    assert names_on_host(fit) == expected


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def test_a_weight_that_is_used_outside_of_every_region_stays():
    stays(Tied, ["first.bias", "middle.weight", "middle.bias"], {"first": PARAMS, "middle": PARAMS})
    everywhere = ["first.weight", "first.bias", "middle.weight", "middle.bias", "last.bias"]
    stays(Tied, everywhere, {"*": PARAMS})


def test_parameters_of_one_storage_stay():
    def make():
        model = layers()
        flat = torch.randn(2 * WIDTH * WIDTH, generator=torch.Generator().manual_seed(2))
        for index in range(2):
            part = flat[index * WIDTH * WIDTH :][: WIDTH * WIDTH]
            model[index].weight = nn.Parameter(part.view(WIDTH, WIDTH))
        return model

    stays(make, ["0.bias", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"])


@pytest.mark.parametrize("hold", [lambda p: p.data.view(-1), lambda p: p.detach()[0], lambda p: p.detach().numpy()])
def test_what_something_else_refers_to_stays_and_is_still_shared(hold):
    def make():
        model = layers(2)
        model.held = hold(model[0].weight)
        return model

    stays(make, ["0.bias", "1.weight", "1.bias"])
    fit, _ = streamed(model=make())
    trained(fit)
    fit.held[:] = 0
    assert float(fit[0].weight.detach().reshape(-1)[0]) == 0.0


def test_without_room_parameters_stay_with_one_warning():
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0), disk_bytes=2 * (WEIGHT + 4096))
    fit = ms.transform(layers(), {"*": PARAMS}, runtime=runtime)
    with pytest.warns(RuntimeWarning, match=r"no tier of \['disk'\] has room") as caught:
        found = trained(fit, 3)
    assert len(caught) == 1
    assert found == trained(layers(), 3)
    assert names_on_host(fit) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_memory_that_is_shared_with_other_processes_is_the_parameters_own():
    """`share_memory()` gives a storage other memory without giving the parameter another storage."""
    fit, plain = streamed()[0], layers()
    for model in (fit, plain):
        trained(model)
        model.share_memory()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    assert trained(fit) == trained(plain)
    assert names_on_host(fit) == []


# ------------------------------------------------------------------------------------- copies, and other contents


def test_copies_are_independent_and_stream_too():
    fit, runtime = streamed()
    trained(fit)
    for other in (copy.deepcopy(fit), pickle.loads(pickle.dumps(fit))):
        assert bits(other.state_dict()) == bits(fit.state_dict())
        with torch.no_grad():
            other[0].weight.zero_()
        assert bool(fit[0].weight.all())
        plain = layers()
        plain.load_state_dict(other.state_dict())
        other.zero_grad()
        assert trained(other) == trained(plain)
        assert names_on_host(other) == names_on_host(fit)
    del other
    fit.zero_grad()
    gc.collect()
    assert moved(runtime)[2] == LAYERS * LAYER


def test_a_saved_state_is_an_ordinary_one():
    fit, _ = streamed()
    trained(fit)
    file = io.BytesIO()
    torch.save(fit.state_dict(), file)
    file.seek(0)
    assert bits(torch.load(file, weights_only=True)) == bits(layers().state_dict())


def set_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def change_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def replace(model):
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


CHANGES = {
    "p.data =": set_data,
    "p.data.mul_": change_data,
    "p.mul_": change,
    "another parameter": replace,
    "load_state_dict": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}, assign=True),
    "vector": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 0.5, [*m.parameters()]
    ),
}


@taking_turns(change=CHANGES, how=HOWS, depth={"0": 0, "2": 2})
def test_other_contents_between_steps(change, how, depth):
    """Also while an earlier graph is alive, which goes backward with what it has seen, or raises."""
    found = []
    for model in (layers(), streamed(how, depth)[0]):
        results = [trained(model, 2)]
        change(model)
        model.zero_grad()
        results.append(trained(model))
        alive = model(rows()).sum()
        change(model)
        model.zero_grad()
        results.append(bits(model(rows())))
        results.append(trained(model))
        del alive
        found.append(results)
    assert found[0] == found[1]
    assert change is CHANGES["vector"] or len(names_on_host(model)) == 2 * LAYERS


def test_a_change_between_two_regions():
    """What was loaded ahead for the second, at once, is out of date by the time it runs."""
    backend = AdversarialDevice(lambda n: 0, {"pinned": 1 << 20})
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=2), backend=backend)
    found = []
    for model in (layers(), ms.transform(layers(), {"*": PARAMS}, runtime=runtime)):

        def halve(*_, model=model):
            with torch.no_grad():
                model[1].weight.mul_(0.5)

        trained(model, 2)
        model[0].register_forward_hook(halve)
        found.append([bits(model(rows())), trained(model)])
    assert found[0] == found[1]


@pytest.mark.parametrize("change", [CHANGES[name] for name in ("p.data =", "another parameter", "assign")])
@pytest.mark.parametrize("train", [True, False])
def test_other_memory_between_forward_and_backward(change, train):
    """Autograd keeps the memory that the forward used, and so does the graph of a streamed one."""
    found = []
    for how in (identity, PARAMS):
        model = streamed(how)[0].requires_grad_(train)
        x = rows().requires_grad_()
        loss = model(x).square().sum()
        held = list(model.parameters())
        change(model)
        gc.collect()
        torch.randn(4, WIDTH, WIDTH)
        found.append(bits(torch.autograd.grad(loss, [x, *held] if train else x, allow_unused=True)))
    assert found[0] == found[1]


@taking_turns(how=HOWS, frozen={"trained": False, "frozen": True})
def test_a_change_in_place_between_forward_and_backward_raises(how, frozen):
    fit, runtime = streamed(how, depth=2)
    fit[1].requires_grad_(not frozen)
    for _ in range(2):
        trained(fit)
        loss = fit(rows()).square().sum()
        with torch.no_grad():
            fit[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="by an inplace operation: parameter 'weight' of Linear, float32"):
            loss.backward()
    plain = layers()
    plain.load_state_dict(fit.state_dict())
    plain[1].requires_grad_(not frozen)
    fit.zero_grad()
    assert trained(fit) == trained(plain)
    assert moved(runtime)[2] >= LAYERS * LAYER


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_streamed_parameters_convert_to_another_type(dtype):
    fit, plain = streamed()[0], layers()
    found = []
    for model in (fit, plain):
        trained(model)
        model.to(dtype).zero_grad()
        model(rows().to(dtype)).sum().backward()
        found.append(bits(gradients(model)))
    assert found[0] == found[1]
    assert len(names_on_host(fit)) == 2 * LAYERS
