import numpy as np
import pytest
import torch
from torch import nn

from memscale.core.errors import ConfigError, RuntimeUnavailable
from memscale.simulation.measured.allocator_trace import measure, training_roles
from memscale.simulation.trace import CATEGORIES

MIB = 1 << 20


def buffer(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_one_buffer_allocated_and_freed():
    trace = measure(lambda: buffer(1))
    assert (trace.start_bytes, trace.peak_bytes, trace.growth_bytes, trace.end_bytes) == (0, MIB, MIB, 0)
    assert trace.timeline.total_bytes.tolist() == [0, MIB, 0]
    assert trace.timeline.live_bytes["temporary"].tolist() == [0, MIB, 0]
    assert trace.backward_seconds is None


def test_the_peak_is_of_what_lives_at_once_not_of_what_was_allocated():
    def step():
        first = buffer(3)
        del first
        second, third = buffer(2), buffer(2)
        del second
        return third

    trace = measure(step)
    assert trace.timeline.total_bytes.tolist() == [0, 3 * MIB, 0, 2 * MIB, 4 * MIB, 2 * MIB, 0]
    assert trace.peak_bytes == 4 * MIB


def test_categories_of_a_training_step_are_exact():
    # One square layer on 256 rows of 256 float32: every tensor of interest has 256 KiB.
    unit = 256 * 256 * 4
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False)
    batch = torch.ones(256, 256)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step():
        layer(batch).sigmoid().sum().backward()
        optimizer.step()

    trace = measure(step, roles=training_roles(layer, optimizer, batch))
    live_bytes = trace.timeline.live_bytes
    assert trace.start_bytes == 2 * unit
    assert set(live_bytes) == set(CATEGORIES)
    assert np.all(live_bytes["parameter"] == unit)
    assert np.all(live_bytes["input"] == unit)
    assert live_bytes["gradient"].max() == live_bytes["gradient"][-1] == unit
    assert live_bytes["optimizer state"].max() == live_bytes["optimizer state"][-1] == unit
    # Backward keeps sigmoid's output and the loss; the layer's own output dies in the forward pass.
    # The seed gradient of backward() is the other scalar.
    assert unit <= live_bytes["activation"].max() <= unit + 64
    assert live_bytes["activation"][-1] == live_bytes["temporary"][-1] == live_bytes["other"].max() == 0
    assert trace.end_bytes == 4 * unit
    assert trace.backward_seconds is not None
    assert 0 < trace.backward_seconds < trace.seconds
    assert np.all(np.diff(trace.timeline.position) >= 0)


def test_frees_that_the_cpu_allocator_hides_are_warned_about():
    layer = nn.Linear(64, 64, bias=False)
    # Not from PyTorch's allocator, which knows a free of what it gives at an address that an earlier recording saw.
    layer.weight.grad = torch.from_numpy(np.zeros((64, 64), np.float32))

    def step():
        layer.weight.grad = None

    with pytest.warns(RuntimeWarning, match=f"freed {64 * 64 * 4} bytes that lived before it"):
        trace = measure(step, roles=training_roles(layer))
    assert trace.peak_bytes == trace.start_bytes == 2 * 64 * 64 * 4


def test_a_free_of_a_block_recorded_earlier_is_subtracted():
    layer = nn.Linear(64, 64, bias=False)
    roles = training_roles(layer)
    measure(lambda: layer(torch.ones(2, 64)).sum().backward(), roles=roles)
    trace = measure(layer.zero_grad, roles=roles)
    assert trace.end_bytes == trace.start_bytes // 2 == 64 * 64 * 4


def test_an_exception_in_the_step_passes_through():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0)
    assert measure(lambda: buffer(1)).peak_bytes == MIB


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="'abacus', which is no device"):
        measure(lambda: None, device="abacus")
    with pytest.raises(ConfigError, match="must be a CPU or a CUDA device, got 'meta'"):
        measure(lambda: None, device="meta")
    with pytest.raises(ConfigError, match=r"unknown roles \['weights'\]; known are \['parameter'"):
        measure(lambda: None, roles=lambda: {"weights": []})


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_measuring_cuda_without_a_device_is_refused():
    with pytest.raises(RuntimeUnavailable, match="needs CUDA"):
        measure(lambda: None, device="cuda")


@pytest.mark.cuda
def test_the_timeline_of_a_cuda_step_is_what_its_allocator_counted():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(512, 256, device="cuda")

    def step():
        loss = model(x).square().mean()
        held = loss * 2  # released outside of any operator
        del held
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    trace = measure(step, device="cuda", roles=training_roles(model, optimizer, x))
    live = trace.timeline.live_bytes
    assert trace.timeline.total_bytes.max() == trace.peak_bytes
    assert trace.end_bytes == torch.cuda.memory_allocated() == trace.start_bytes
    assert 6 * x.nbytes <= live["activation"].max() < 7 * x.nbytes  # what each linear layer and each GELU keeps
    assert live["temporary"].max() >= x.nbytes  # born in backward
    assert live["activation"][-1] == live["temporary"][-1] == 0
