"""How long an operator takes: every figure is one that can be computed by hand."""

import pytest
import torch

import memscale as ms
from memscale import ConfigError, Hardware
from memscale.hardware import Work, nominal, seconds

CARD = Hardware("card", "cuda", 1 << 30, flops_per_second={"float32": 1e12, "bfloat16": 8e12, "float8_e4m3fn": 16e12},
                bandwidth_bytes_per_second=1e11, launch_seconds=1e-6)  # fmt: skip


def changed(**fields):
    return Hardware(**{**vars(CARD), **fields})


def test_the_slower_of_arithmetic_and_traffic_decides():
    exact = changed(measured=True)
    assert seconds(Work(8 * 10**9, 10**6, "bfloat16"), exact) == pytest.approx(1e-3 + 1e-6)
    assert seconds(Work(8 * 10**9, 10**9, "bfloat16"), exact) == pytest.approx(1e-2 + 1e-6)
    assert seconds(Work(8 * 10**9, 0, "float32"), exact) == pytest.approx(8e-3 + 1e-6)


def test_a_data_sheet_is_not_reached_and_a_measured_speed_is():
    compute, memory = Work(8 * 10**9, 0, "bfloat16"), Work(0, 10**9, "bfloat16")
    assert seconds(compute, CARD) == pytest.approx(1e-3 / 0.8 + 1e-6)
    assert seconds(memory, CARD) == pytest.approx(1e-2 / 0.85 + 1e-6)
    assert seconds(compute, changed(measured=True)) == pytest.approx(1e-3 + 1e-6)
    assert seconds(memory, changed(measured=True)) == pytest.approx(1e-2 + 1e-6)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_default_rates_of_a_cpu_grow_with_the_threads(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = nominal(Hardware("box", "cpu", 2**34))
    assert seconds(Work(10**12, 10**6, "bfloat16"), found) == pytest.approx(10.0 / threads, rel=1e-3)
    assert seconds(Work(0, 24 * 10**9, "float32"), found) == pytest.approx(1.0 / threads, rel=1e-3)


def test_speeds_are_missed_only_where_they_are_needed():
    bare = Hardware("bare", "cuda", 1)
    with pytest.raises(
        ConfigError, match=r"on 'bare' needs bandwidth_bytes_per_second, .*replace\(hardware, bandwidth_b"
    ):
        seconds(Work(0, 1, "float32"), bare)
    with pytest.raises(
        ConfigError, match=r"needs flops_per_second\['float16'\], .*replace\(hardware, flops_per_second="
    ):
        seconds(Work(1, 1, "float16"), CARD)
    assert seconds(Work(0, 0, ""), bare) == 0.0
    assert seconds(Work(0, 1, "float16"), CARD) > 0
    assert seconds(Work(1, 0, "float32"), changed(bandwidth_bytes_per_second=None)) > 0


@pytest.mark.parametrize("card", ["t4", "v100-16"])
def test_a_step_without_a_time_names_the_dtype_that_the_card_lacks(card):
    def notes(dtype):
        model = torch.nn.Linear(8, 8).to(dtype)
        profile = ms.profile(model, torch.ones(4, 8, dtype=dtype), loss=lambda y, _: y.mean(), hardware=card)
        assert (profile.step_seconds is None) == bool(profile.notes)
        return profile.notes

    assert notes(torch.float16) == notes(torch.float32) == ()
    (note,) = notes(torch.bfloat16)
    assert note.startswith(
        f"no step time: {Hardware.named(card).name} has no rate for bfloat16, in which the step computes"
    )
    assert "(float16, float32, float64" in note
