"""A trace is a value: no analysis changes it, it survives JSON, it says what is wrong with a text that is none."""

import dataclasses

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation import MemoryProfiler, Trace, analyse, attribute, memory, shares
from memscale.simulation.allocator.allocator_settings import AllocatorSettings
from tests.support.models import TransformerBlock


def traced(plan=None, hardware="h100"):
    model = nn.Sequential(*[TransformerBlock(16) for _ in range(3)])
    profiler = MemoryProfiler(
        model, torch.optim.AdamW(model.parameters()), loss=lambda y, _: y.square().mean(), plan=plan, hardware=hardware
    )
    return profiler.simulated(torch.zeros(4, 16, 16))


@pytest.mark.parametrize("plan", [None, {"*": ms.compose(ms.offload(min_bytes=0), ms.checkpoint())}])
def test_no_analysis_changes_a_trace(plan):
    trace = traced(plan)
    before, profile = trace.digest(), analyse(trace)
    memory(trace, AllocatorSettings(expandable_segments=True), capacity_bytes=1 << 16, advises=True)
    attribute(trace, ["0", "1", "2"])
    shares(trace, ["0"])
    assert str(trace)
    assert analyse(trace) == profile
    assert trace.digest() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.events = ()
    hash(trace.events + trace.event_ops + trace.ops + trace.storages + trace.times.stalls + trace.times.transfers)


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@pytest.mark.parametrize("plan", [None, {"*": ms.offload(min_bytes=0)}])
def test_what_json_brings_back_is_the_same_trace(plan, hardware):
    trace = traced(plan, hardware if hardware == "h100" else ms.Hardware("box", "cpu", 2**34))
    again = Trace.from_json(trace.to_json())
    assert again == trace
    assert again.digest() == trace.digest()
    assert analyse(again) == analyse(trace)
    assert bool(trace.times.transfers) == (plan is not None)


def test_other_steps_have_other_digests():
    assert len({traced().digest(), traced({"0": ms.checkpoint()}).digest(), traced(hardware="t4").digest()}) == 3


def test_the_allocator_is_an_argument():
    """Expandable segments change what is reserved in pages of 2 MiB, and not what is handed out."""
    trace = traced()
    fixed, expandable = (memory(trace, AllocatorSettings(expandable_segments=each)) for each in (False, True))
    assert fixed.peaks == expandable.peaks
    assert fixed.sizes == expandable.sizes
    assert fixed.reserved_peak_bytes != expandable.reserved_peak_bytes


def test_a_trace_prints_its_operators():
    text = str(traced())
    first, header, *rows = text.splitlines()
    assert first.startswith("trace for NVIDIA H100")
    assert header.split() == ["phase", "operator", "module", "allocates", "frees"]
    assert rows[0].startswith("forward")
    assert rows[-1].startswith("and ")


def test_a_text_that_is_no_trace_says_so():
    with pytest.raises(ms.ConfigError, match=r"write it with Trace\.to_json"):
        Trace.from_json("{")
    with pytest.raises(ms.ConfigError, match="missing or unknown parts"):
        Trace.from_json('{"memscale_trace": 1}')
