"""A step taken apart by modules and intervals, and put together again."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation import Phase, analyse, attribute
from tests.support.models import TransformerBlock


def _model():
    return nn.Sequential(nn.Embedding(64, 16), *[TransformerBlock(16) for _ in range(3)], nn.Linear(16, 64))


def _step(plan=None):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(4, 16, dtype=torch.long)
    profiler = ms.MemoryProfiler(
        model, optimizer, loss=lambda y, _: y.square().mean(), plan=plan, hardware=ms.Hardware.named("h100")
    )
    return model, profiler.simulated(tokens)


def _blocks(model):
    return [path for path, module in model.named_modules() if isinstance(module, TransformerBlock)]


@pytest.mark.parametrize("how", [None, ms.checkpoint(), ms.compose(ms.offload(min_bytes=0), ms.checkpoint())])
def test_the_parts_add_up_to_the_step(how):
    model, step = _step()
    paths = _blocks(model)
    model, step = _step(None if how is None else dict.fromkeys(paths, how))
    found = attribute(step, paths)
    totals = found.held_bytes.sum(axis=0) - found.slack_bytes
    assert (found.slack_bytes >= 0).all()
    live = analyse(step).timeline.live_bytes
    exact = max(sum(values) for values in zip(*(live[name] for name in live if name != "rounding"), strict=True))
    assert exact <= totals.max() <= exact + 512 * len(step.storages)  # blocks of the allocator
    profile = analyse(step)
    waits = sum(seconds for cause, seconds in profile.exposed_seconds.items() if cause != "host")
    assert found.seconds.sum() == pytest.approx(profile.step_seconds - waits)


def test_what_the_host_does_for_an_optimizer_is_in_the_parts_once():
    """It computes beside the card, which waits for it, behind the last operator too."""
    model = _model()
    optimizer = ms.offload_states()(torch.optim.AdamW(model.parameters()))
    profiler = ms.MemoryProfiler(
        model, optimizer, loss=lambda y, _: y.square().mean(), hardware=ms.Hardware.named("h100")
    )
    step = profiler.simulated(torch.zeros(4, 16, dtype=torch.long))
    assert step.times.on_host
    profile = analyse(step)
    assert set(profile.exposed_seconds) == {"host"}
    assert attribute(step, _blocks(model)).seconds.sum() == pytest.approx(profile.step_seconds, rel=1e-6)


def test_what_backward_waits_for_is_the_doing_of_the_part_that_keeps_it():
    model, _ = _step()
    paths = _blocks(model)
    _, plain = _step()
    _, first = _step({paths[0]: ms.checkpoint()})
    before, after = attribute(plain, paths), attribute(first, paths)
    assert after.kept_bytes[0] < before.kept_bytes[0]
    assert (after.kept_bytes[1:] == before.kept_bytes[1:]).all()
    assert after.seconds[0, 1] > before.seconds[0, 1]  # the recompute is the region's
    assert after.seconds[1:] == pytest.approx(before.seconds[1:])


def test_a_step_without_updates_is_its_forward_and_backward():
    model, _ = _step()
    optimizer = torch.optim.AdamW(model.parameters())
    profiler = ms.MemoryProfiler(model, optimizer, loss=lambda y, _: y.square().mean())
    trace = profiler.simulated(torch.zeros(4, 16, dtype=torch.long), updates=False)
    found = attribute(trace, _blocks(model))
    assert {interval.phase for interval in found.intervals} == {Phase.FORWARD, Phase.BACKWARD}
    assert found.states_bytes.sum() == 0
    assert found.parameters_bytes.sum() == sum(parameter.nbytes for parameter in model.parameters())
