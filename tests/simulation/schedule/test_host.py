"""The host of a simulated card: how much of it a plan takes, what spills from tier to tier, and what is assumed."""

import dataclasses

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime
from tests.support.hosts import QUICK_HOST

CARD = dataclasses.replace(ms.Hardware.named("h100"), call_seconds=QUICK_HOST)
MIB = 1 << 20
LAYERS = 6
MOVED = 8192 * 2048 * 2  # bytes of a layer's input


def profiled(runtime=None, how=None, **hardware):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(LAYERS)]).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.empty(8192, 2048, device="meta", dtype=torch.bfloat16)
    fit = ms.transform(model, {"*": how or ms.compose(ms.offload(), ms.checkpoint())}, runtime=runtime)
    card = dataclasses.replace(CARD, **hardware)
    return ms.profile(fit, batch, optimizer=optimizer, loss=lambda y, _: y.float().sum(), hardware=card)


def test_what_moves_is_pinned_as_far_as_the_host_goes():
    free = profiled()
    assert set(free.by_tier) == {"pinned"}
    assert free.pinned_bytes >= 3 * MOVED
    assert free.notes == ()
    small = profiled(host_memory_bytes=512 * MIB + 2 * MOVED)
    assert small.by_tier == {"pinned": 2 * MOVED, "disk": free.pinned_bytes - 2 * MOVED}
    spilled, assumed = small.notes
    assert spilled == "64.0 MiB of what moves lies on disk at most, since the host has 576 MiB of RAM"
    assert "disk reads: 3 GB/s was assumed" in assumed
    assert small.exposed_seconds["disk"] > 0


@pytest.mark.parametrize(
    ("runtime", "tiers", "why"),
    [
        (Runtime(ms.AsyncOffloadConfig(pool_bytes=MOVED)), ["pinned", "pageable"], f"pool_bytes={MOVED}"),
        (Runtime(host_bytes=MOVED), ["pinned", "disk"], "max_cpu_offload_gb"),
        (Runtime(host_bytes=0), ["disk"], "max_cpu_offload_gb"),
    ],
)
def test_what_spills_says_why(runtime, tiers, why):
    profile = profiled(runtime, disk_read_bytes_per_second=1e9, disk_write_bytes_per_second=1e9)
    assert list(profile.by_tier) == tiers
    assert [why in note for note in profile.notes] == [True]


def test_a_tier_that_was_asked_for_is_no_spill():
    profile = profiled(how=ms.offload(tier="disk"), disk_read_bytes_per_second=1e9, disk_write_bytes_per_second=1e9)
    assert list(profile.by_tier) == ["disk"]
    assert profile.notes == ()


def test_each_tier_is_slower_than_the_one_above():
    tiers = ("pinned", "pageable", "disk")
    seconds = [profiled(how=ms.offload(tier=tier)).step_seconds for tier in tiers]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]


def test_a_slower_disk_and_a_slower_host_take_longer():
    disks = [
        profiled(how=ms.offload(tier="disk"), disk_read_bytes_per_second=rate, disk_write_bytes_per_second=rate)
        for rate in (4e9, 2e9, 1e9)
    ]
    streamed = [
        profiled(how=ms.offload(what="params"), host_bandwidth_bytes_per_second=rate) for rate in (200e9, 50e9, 10e9)
    ]
    for found in (disks, streamed):
        seconds = [profile.step_seconds for profile in found]
        assert seconds == sorted(seconds)
        assert seconds[-1] > 1.1 * seconds[0]
    assert [profile.exposed_seconds["host"] for profile in streamed] == sorted(
        profile.exposed_seconds["host"] for profile in streamed
    )


def test_a_runtime_made_for_a_step_has_its_sizes():
    profile = profiled()
    runtime = profile.runtime()
    assert runtime.config.prefetch_depth == profile.prefetch_depth
    assert profile.pinned_bytes <= runtime.config.pool_bytes <= profile.pinned_bytes + 768 * MIB
    assert set(profiled(runtime).by_tier) == {"pinned"}
    capped = profile.runtime(max_cpu_offload_gb=MOVED / 1e9)
    assert profiled(capped).pinned_bytes == MOVED


def test_a_cpu_waits_for_its_disk():
    """The disk is the only queue beside it, and who waits is the one who computes."""
    found = []
    for rate in (8e9, 1e9, 2e7):
        box = ms.Hardware(
            name="box",
            device_type="cpu",
            memory_bytes=1 << 40,
            flops_per_second={"float32": 2e11},
            bandwidth_bytes_per_second=2e10,
            disk_read_bytes_per_second=rate,
            disk_write_bytes_per_second=rate,
            measured=True,
        )
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(LAYERS)])
        batch = torch.empty(4096, 1024, device="meta")
        found.append(ms.profile(model, batch, loss=lambda y, _: y.sum(), plan={"*": ms.offload()}, hardware=box))
    for profile in found:
        computed = sum(operator.seconds for operator in profile.schedule.operators)
        assert computed + sum(profile.exposed_seconds.values()) == pytest.approx(profile.step_seconds)
        assert set(profile.schedule.utilisation) <= {"device", "out", "in", "disk"}
    waits = [profile.exposed_seconds.get("disk", 0.0) for profile in found]
    moved = found[-1].by_tier["disk"]
    assert waits == sorted(waits)
    assert waits[0] < 0.1 * found[0].step_seconds
    assert waits[-1] > 0.75 * moved / 2e7  # at least one way, less what hides behind the compute
