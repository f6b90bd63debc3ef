"""What holds of every schedule: copies take their time in order, and what is computed and what waits is the step."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.schedule.clock import CAUSES
from tests.support.hosts import QUICK_HOST

LINK = 20e9
LAYERS = 6


def linked(rate):
    link = {"host_to_device_bytes_per_second": rate, "device_to_host_bytes_per_second": rate}
    return dataclasses.replace(ms.Hardware.named("h100"), call_seconds=QUICK_HOST, **link)


def profiled(how, width=2048, rows=8192, card=linked(LINK)):  # noqa: B008
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]).bfloat16()
    batch = torch.empty(rows, width, device="meta", dtype=torch.bfloat16)
    return ms.profile(model, batch, loss=lambda y, _: y.float().sum(), plan={"*": how}, hardware=card)


def test_copies_take_their_time_in_order_and_waits_are_counted_once():
    moved, paged = profiled(ms.offload()), profiled(ms.offload(tier="pageable"))
    assert moved.step_seconds >= moved.pinned_bytes / LINK
    assert paged.step_seconds > 1.1 * moved.step_seconds
    out, back = (sum(each.nbytes for each in moved.schedule.copies if each.direction == way) for way in ("out", "in"))
    assert moved.pinned_bytes >= out == back > 0
    for profile in (moved, paged):
        schedule = profile.schedule
        computed = sum(operator.seconds for operator in schedule.operators)
        assert computed + sum(profile.exposed_seconds.values()) == pytest.approx(profile.step_seconds)
        assert {"input", "room"} <= set(profile.exposed_seconds)
        for direction in ("out", "in"):
            copies = sorted((copy for copy in schedule.copies if copy.direction == direction), key=lambda c: c.begin)
            for before, after in itertools.pairwise(copies):
                assert after.begin >= before.begin + before.seconds - 1e-12
            assert copies[0].begin > 0  # nothing leaves, or comes back, before it was computed
    last = max(operator.begin for operator in moved.schedule.operators if operator.phase == "forward")
    assert min(copy.begin for copy in moved.schedule.copies if copy.direction == "in") > last / 2
    small = profiled(ms.identity, width=64, rows=16, card=ms.Hardware.named("h100"))
    assert small.exposed_seconds["host"] > 0.1 * small.step_seconds
    assert "host" not in profiled(ms.identity).exposed_seconds


@pytest.mark.parametrize(
    "how",
    [
        ms.compose(ms.offload(), ms.checkpoint()),
        pytest.param(ms.offload(what="params"), marks=pytest.mark.deep),
        pytest.param(ms.offload(), marks=pytest.mark.deep),
        pytest.param(ms.offload(tier="disk"), marks=pytest.mark.deep),
    ],
    ids=repr,
)
def test_a_slower_link_never_makes_a_step_faster(how):
    found = [profiled(how, rows=1024, card=linked(rate)) for rate in (63e9, 6e9, 5e8)]
    waits = [sum(profile.exposed_seconds.values()) for profile in found]
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]
    for profile, waited in zip(found, waits, strict=True):
        assert profile.step_seconds - waited == pytest.approx(found[0].step_seconds - waits[0])
        assert profile.peak_bytes == found[0].peak_bytes
        assert set(profile.exposed_seconds) <= set(CAUSES)
        assert sum(profile.seconds_by_module.values()) == pytest.approx(profile.step_seconds)
