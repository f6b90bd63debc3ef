"""`timeline`: from the events of one trace, the times on its own hardware and on other hardware with its kernels."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation import MemoryProfiler, Trace, timeline
from memscale.simulation.measured import part_times
from tests.support.coverings import in_turn, taking_turns
from tests.support.models import TransformerBlock

H100 = ms.Hardware.named("h100")
BOX = ms.Hardware("box", "cpu", 2**34, flops_per_second={"float32": 1e11}, bandwidth_bytes_per_second=2e10)
SLOWER = dataclasses.replace(
    H100,
    flops_per_second={dtype: rate / 30 for dtype, rate in H100.flops_per_second.items()},
    bandwidth_bytes_per_second=H100.bandwidth_bytes_per_second / 30,
)
#: Cards with the kernels of an H100: other rates, another link, another host, other links between processes.
OTHERS = {
    "slower": SLOWER,
    "link": dataclasses.replace(H100, host_to_device_bytes_per_second=5e9, device_to_host_bytes_per_second=3e9),
    "host": dataclasses.replace(H100, call_seconds={"operator": 1e-6, "backward": 1e-6, "view": 1e-7, "module": 1e-6}),
    "nodes": dataclasses.replace(H100, devices_per_node=2),
    "no rate": dataclasses.replace(H100, flops_per_second={}),
}
PLANS = {
    "plain": None,
    "checkpoint": {"*": ms.checkpoint()},
    "offload": {"*": ms.offload(min_bytes=0)},
    "disk": {"*": ms.offload(tier="disk", min_bytes=0)},
    "streamed": {"*": ms.offload(what="params", min_bytes=0)},
}
SPREAD = {"one": {}, "fsdp2": {"parallel": "fsdp2", "world": 8}, "ddp": {"parallel": "ddp", "world": 8}}


@functools.cache
def of_an_h100(spread, plan):
    return traced(H100, PLANS[plan], **SPREAD[spread])


def traced(hardware, plan=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[TransformerBlock(32) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    profiler = MemoryProfiler(
        model, optimizer, loss=lambda y, _: y.square().mean(), plan=plan, hardware=hardware, **options
    )
    return profiler.simulated(torch.zeros(4, 16, 32))


@taking_turns(plan=PLANS, hardware={"card": H100, "cpu": BOX})
def test_the_times_on_its_own_hardware_are_those_of_the_trace(plan, hardware):
    trace = traced(hardware, plan)
    assert trace.times.timed
    assert timeline(trace, hardware) == trace.times
    assert timeline(Trace.from_json(trace.to_json()), hardware) == trace.times


@pytest.mark.parametrize("spread", ["fsdp2", "ddp"])
def test_so_they_are_between_processes(spread):
    trace = of_an_h100(spread, "plain")
    assert trace.times.collectives
    assert timeline(trace, H100) == trace.times


def test_so_they_are_where_operators_were_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    monkeypatch.setattr(part_times, "_is_clean", lambda samples: True)  # a busy machine measures, too
    hardware = ms.Hardware("box", "cpu", 2**34)
    trace = traced(hardware, probe=True)
    assert trace.times != traced(hardware).times
    assert timeline(trace, hardware) == trace.times


@pytest.mark.parametrize(
    ("other", "of"), in_turn(OTHERS, [("one", "plain"), ("one", "checkpoint"), ("fsdp2", "plain")])
)
def test_on_other_hardware_they_are_those_of_a_simulation_for_it(other, of):
    spread, plan = of
    one, another = of_an_h100(spread, plan), traced(OTHERS[other], PLANS[plan], **SPREAD[spread])
    is_alike = other == "link" or (other, spread) == ("nodes", "one")  # these steps have no copies to the host
    assert (one.times == another.times) == is_alike
    assert timeline(one, OTHERS[other]) == another.times


def test_a_step_that_offloads_is_close_where_the_engine_looks_at_the_time():
    one, another = of_an_h100("one", "offload"), traced(OTHERS["link"], PLANS["offload"])
    times = timeline(one, OTHERS["link"])
    assert sum(each.nbytes for each in times.transfers) == sum(each.nbytes for each in another.times.transfers)
    assert times.end == pytest.approx(another.times.end, rel=0.05)


def test_kernels_of_another_card_are_refused():
    trace = of_an_h100("one", "plain")
    with pytest.raises(ms.ConfigError, match=r"the trace has the kernels of NVIDIA H100.*simulate the step"):
        timeline(trace, ms.Hardware.named("t4"))
    unlinked = dataclasses.replace(H100, host_to_device_bytes_per_second=None)
    assert timeline(trace, unlinked) == trace.times
    with pytest.raises(ms.ConfigError, match="the speed of this link is unknown"):
        timeline(of_an_h100("one", "offload"), unlinked)
