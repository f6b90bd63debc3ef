"""The step on the host of a card's parameters, with the real caching allocator on fake CUDA libraries."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime
from memscale.runtime.parameters.host_copy import HostCopy
from tests.ghost.record import Accessing, Order, recorded, recording, tried_on_the_cpu  # noqa: F401

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("tried_on_the_cpu")]
lib = recording
IN_BACKWARD = ms.compose(ms.step_in_backward(), ms.offload_states())
HOWS = {
    "step": ms.offload_states(),
    "in backward": IN_BACKWARD,
    "disk": ms.compose(ms.step_in_backward(), ms.offload_states(tier="disk")),
}


def races(lib, how, delay):
    with recorded(lib, delay=delay) as calls:
        runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0))
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(5)]).cuda()
        optimizer = how.on(runtime)(torch.optim.AdamW(model.parameters()))
        fit = ms.transform(model, {"*": ms.offload(min_bytes=0)}, runtime=runtime)
        x = torch.randn(64, 256, device="cuda")
        with Accessing(lib):
            for _ in range(3):
                fit(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
    return Order().check(calls)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_its_copies_are_in_order_with_the_link_of_activations(lib, how):
    for delay in range(4):
        assert races(lib, how, delay) == []


def not_synchronized(self):
    """The host steps before gradients are there."""
    self._out = None
    return self.values


def not_awaited(self, tensor):
    """The device goes on before the weights are back."""
    memory, _ = self._in
    if not self._is_its_own:
        tensor.copy_(memory.view(self.values.dtype).as_strided(self.values.shape, self.values.stride()))
    self._in = None


@pytest.mark.parametrize(("name", "mutant"), [("arrived", not_synchronized), ("bring_back", not_awaited)])
@pytest.mark.parametrize("how", [HOWS["step"], IN_BACKWARD], ids=["step", "in backward"])
def test_the_record_shows_a_wait_that_is_left_out(monkeypatch, lib, how, name, mutant):
    monkeypatch.setattr(HostCopy, name, mutant)
    assert any(races(lib, how, delay) for delay in range(1, 4))


@pytest.mark.parametrize("keeps_output", [True, False], ids=["keeps output", "inline"])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_the_device_holds_what_the_simulation_says(lib, how, keeps_output):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]).cuda()
    x = torch.randn(64, 1024, device="cuda")
    optimizer = how(torch.optim.AdamW(model.parameters()))
    step = {"optimizer": optimizer, "loss": lambda y, _: y.square().mean(), "hardware": "h100"}
    predicted = ms.profile(model, x, keeps_output=keeps_output, **step)
    output = None
    for number in range(3):
        if number == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if keeps_output:
            output = model(x)
            output.square().mean().backward()
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del output
    assert torch.cuda.max_memory_allocated() == pytest.approx(predicted.peak_bytes, rel=1e-3)


def test_states_of_parameters_that_stream_live_where_these_do():
    """Not on the disk, which is what there is below the CPU, the device that such parameters say."""
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0))
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
    fit = ms.transform(model, {"*": ms.offload(what="params", min_bytes=0)}, runtime=runtime).to("cuda")
    optimizer = IN_BACKWARD.on(runtime)(torch.optim.AdamW(model.parameters()))
    fit(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    states = sum(each.nbytes for parameter in model.parameters() for each in optimizer.state[parameter].values())
    live = {device: dict(stats.live_bytes) for device, stats in runtime.stats().items()}
    assert live == {"cuda:0": {"pinned": pytest.approx(weights + states, rel=0.02)}}
