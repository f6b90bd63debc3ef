"""A device whose memory is its host's: bytes on the host's tiers are the device's, and a plan offloads nothing."""

import dataclasses

import pytest
import torch
from torch import nn

import memscale as ms

SPARK = ms.Hardware.named("gb10")
BATCH = torch.zeros(8192, 256)


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))


def loss(output, _):
    return output.square().mean()


def test_what_is_offloaded_counts_as_taken():
    plan = ms.Plan({"*": ms.offload()})
    apart = dataclasses.replace(SPARK, unified_memory=False)
    shared, own = (ms.profile(stack(), BATCH, loss=loss, plan=plan, hardware=each) for each in (SPARK, apart))
    assert own.by_tier["pinned"] > 4 * BATCH.nbytes
    assert shared.reserved_peak_bytes == own.reserved_peak_bytes
    assert shared.taken_bytes == own.taken_bytes + sum(own.by_tier.values())


def test_a_plan_offloads_nothing():
    model = stack()
    plain = ms.profile(model, BATCH, loss=loss, hardware=SPARK)
    plan = ms.plan(model, BATCH, int(0.7 * plain.taken_bytes), loss=loss, hardware=SPARK)
    assert "checkpoint" in repr(plan)
    assert "offload" not in repr(plan)
    planned = ms.profile(model, BATCH, loss=loss, plan=plan, hardware=SPARK)
    assert planned.taken_bytes <= 0.7 * plain.taken_bytes


def test_a_config_that_asks_for_offloading_is_told_why_not():
    with pytest.raises(ms.ConfigError, match="shares its host's memory"):
        ms.plan(stack(), BATCH, "10MiB", loss=loss, hardware=SPARK, config=ms.Config(enable_offloading=True))


def test_it_is_written_down():
    assert ms.Hardware.from_json(SPARK.to_json()) == SPARK
    with pytest.raises(ms.ConfigError, match=r"unified_memory='yes'\) must be True or False"):
        dataclasses.replace(SPARK, unified_memory="yes")
