"""What a runtime says it moved, from where, and what stayed and why; and a plan that moves nothing says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime

BLOCK_BYTES = 64 * 512 * 4


def blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(2)])


def moved(how, *, steps=1, config=None):
    runtime = Runtime(config or ms.AsyncOffloadConfig(prefetch_depth=0, min_bytes=4096))
    model = ms.transform(blocks(), {"*": how}, runtime=runtime)
    for _ in range(steps):
        model(torch.ones(64, 512)).square().sum().backward()
    return runtime.stats()


def test_each_module_has_what_it_moved_and_what_stayed():
    found = moved(ms.offload())["cpu"]
    # The first's input is the batch, which the caller has; the second's, which the container has while that runs.
    region = {"moved": 2 * BLOCK_BYTES, "held": BLOCK_BYTES, "small": 2 * 64 * 4}
    assert found.by_region == {"0": region, "1": region}
    assert sum(found.out_bytes.values()) == sum(fates["moved"] for fates in found.by_region.values())


def test_the_table_says_the_same():
    lines = str(moved(ms.offload())).splitlines()
    assert lines[0] == "cpu"
    assert lines[1].split() == ["tier", "out", "back", "there", "now", "at", "most", "reserved"]
    assert next(line.split() for line in lines if line.split()[:1] == ["0"])[1:3] == ["256", "KiB"]


def test_a_table_of_many_regions_ends_with_the_rest():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=0))
    ms.transform(model, {"*": ms.offload()}, runtime=runtime)(torch.ones(2, 8)).sum().backward()
    lines = str(runtime.stats()["cpu"]).splitlines()
    assert "(7 more)" in lines[-1]


def test_what_parameters_moved_is_told_apart():
    found = moved(ms.offload(what="params"))
    assert "parameters and gradients" in str(found)
    assert not found["cpu"].by_region


IDLE = {
    "weights below min_bytes": (
        lambda: moved(ms.offload(what="params", min_bytes=1 << 24)),
        "largest has 1048576 bytes",
    ),
    "a bare function's": (
        lambda: ms.offload(what="params")(nn.Linear(8, 8))(torch.ones(1, 8)),
        "largest has 256 bytes, and min_bytes is 1048576",
    ),
    "no pinned memory on a host": (lambda: moved(ms.offload(tier="pinned"), steps=2), "what moves goes to disk"),
    "nor for parameters": (lambda: moved(ms.offload(what="params", tier="pageable")), "what moves goes to disk"),
}


@pytest.mark.parametrize(("idle", "message"), IDLE.values(), ids=IDLE)
def test_what_does_not_do_what_it_says_speaks_once(idle, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        idle()
    assert [message in str(warning.message) for warning in caught] == [True]


def test_a_norm_among_larger_layers_is_no_reason_to_speak():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 512, bias=False))
    ms.transform(model, {"*": ms.offload(what="params", min_bytes=4096)})(torch.ones(1, 8))


def test_a_profile_notes_it():
    fit = ms.transform(blocks(), {"*": ms.offload(tier="pinned", min_bytes=4096)})
    found = ms.profile(fit, torch.ones(64, 512), loss=lambda y, _: y.sum(), hardware="cpu")
    assert any("what moves goes to disk" in note for note in found.notes)
